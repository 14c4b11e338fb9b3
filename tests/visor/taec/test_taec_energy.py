"""Eq. 5 against the plain recursion and by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from visor.taec.energy import MemoryItem, energies, strongest

CHAIN = [[], [0], [1]]
"""Parents of three searches of a VISOR trajectory."""
DECAY = {"page": 0.1, "crop": 0.05, "text": 0.0}


def slow_energy(index, parents, items, gamma):
    """Eq. 5 read literally: every child's mean is worked out again each time it is needed."""
    item = items[index]
    children = [node for node, own in enumerate(parents) if item.node in own]
    means = []
    for child in children:
        held = [i for i, other in enumerate(items) if other.node == child]
        values = [slow_energy(i, parents, items, gamma) for i in held]
        means.append(sum(values) / len(values) if values else 0.0)
    age = len(parents) - 1 - item.node
    own = item.priority / 5 * (1 + len(children)) * math.exp(-DECAY[item.granularity] * age)
    return own + gamma * sum(means)


@st.composite
def memories(draw):
    nodes = draw(st.integers(1, 6))
    parents = [
        draw(st.lists(st.integers(0, node - 1), max_size=2, unique=True)) if node else []
        for node in range(nodes)
    ]
    item = st.builds(
        MemoryItem,
        node=st.integers(0, nodes - 1),
        granularity=st.sampled_from(sorted(DECAY)),
        priority=st.integers(1, 5),
    )
    return parents, draw(st.lists(item, max_size=6))


@settings(derandomize=True, max_examples=150, deadline=None)
@given(memory=memories(), gamma=st.sampled_from([0.0, 0.3, 1.0]))
def test_equals_the_plain_recursion(memory, gamma):
    parents, items = memory
    expected = [slow_energy(index, parents, items, gamma) for index in range(len(items))]
    assert energies(parents, items, decay=DECAY, gamma=gamma) == pytest.approx(expected)


def test_chain_by_hand():
    items = [MemoryItem(0), MemoryItem(1, "crop", 5), MemoryItem(2), MemoryItem(2, "text", 1)]
    # Node 2: pages 3/5 and 1/5, mean 0.4. Node 1: 1 · 2 · e^−0.05 + 0.3 · 0.4.
    node_1 = 2 * math.exp(-0.05) + 0.12
    expected = [0.6 * 2 * math.exp(-0.2) + 0.3 * node_1, node_1, 0.6, 0.2]
    assert energies(CHAIN, items, decay=DECAY, gamma=0.3) == pytest.approx(expected)


def test_a_child_without_items_gives_nothing():
    # Node 1 holds nothing, so node 2's energy does not reach node 0 through it.
    items = [MemoryItem(0, "text", 5), MemoryItem(2, "text", 5)]
    assert energies(CHAIN, items, decay=DECAY, gamma=0.3) == pytest.approx([2.0, 1.0])


def test_strongest_keeps_the_order_of_memory_and_prefers_newer_ones():
    assert strongest([1.0, 3.0, 1.0, 2.0], 3) == [1, 2, 3]
    assert strongest([1.0], 5) == [0]
    assert strongest([], 5) == []
