"""Energy of the images in memory: how much each still matters to the trajectory (TAEC, eq. 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from visor.taec.exposure import persistence

Granularity = Literal["page", "crop", "text"]
MAX_PRIORITY = 5


@dataclass(frozen=True)
class MemoryItem:
    """An image (or text) kept in memory under the graph node that admitted it."""

    node: int
    """Index of the node; nodes are numbered in the order they were made."""
    granularity: Granularity = "page"
    priority: int = 3
    """p_i, 1–5 as the policy reported it; 3 for a policy that reports none."""


def energies(
    parents: Sequence[Sequence[int]],
    items: Sequence[MemoryItem],
    *,
    decay: Mapping[str, float],
    gamma: float,
) -> list[float]:
    """Ω_i of every item, in the order of `items` (eq. 5).

    `parents[m]` lists the parents of node m, all older than m (a VISOR trajectory is a chain: one node a
    search, child of the one before); the age of an item is the last node's index minus its own node's.
    `decay` gives λ of each granularity, `gamma` the share of a child's mean energy that its parent's items
    receive. Nodes are walked newest first, so that a child's energy is complete, its own reinforcement
    included, before its parents are reached.
    """
    children: list[list[int]] = [[] for _ in parents]
    for node, node_parents in enumerate(parents):
        for parent in node_parents:
            assert 0 <= parent < node, f"node {node} has parent {parent}, which is not older"
            children[parent].append(node)
    held: list[list[int]] = [[] for _ in parents]
    for index, item in enumerate(items):
        held[item.node].append(index)

    newest = len(parents) - 1
    energy = [0.0] * len(items)
    mean_energy = [0.0] * len(parents)
    for node in range(newest, -1, -1):
        inherited = gamma * sum(mean_energy[child] for child in children[node])
        for index in held[node]:
            item = items[index]
            freshness = persistence(decay[item.granularity], newest - node)
            energy[index] = item.priority / MAX_PRIORITY * (1 + len(children[node])) * freshness + inherited
        if held[node]:
            mean_energy[node] = sum(energy[index] for index in held[node]) / len(held[node])
    return energy


def strongest(energy: Sequence[float], count: int) -> list[int]:
    """Indices of the `count` items of most energy, newest first among equals, in the order of memory."""
    ranked = sorted(range(len(energy)), key=lambda index: (-energy[index], -index))
    return sorted(ranked[:count])
