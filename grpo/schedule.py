"""Which questions a step trains on: a function of seed and step alone, so a resumed run cannot drift."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

from visor.types import derive_seed

Item = TypeVar("Item")


def step_items(items: Sequence[Item], step: int, per_step: int, seed: int) -> list[Item]:
    """The items of step `step` (1-based), walking through one shuffled epoch after the other.

    Every item is drawn once before any is drawn again; a step at the end of an epoch goes on into the next.
    """
    return items_from(items, (step - 1) * per_step, per_step, seed)


def items_from(items: Sequence[Item], first: int, count: int, seed: int) -> list[Item]:
    """`count` items from place `first` (0-based) of that walk on."""
    if not items:
        raise ValueError("there is nothing to draw from")
    chosen = []
    for position in range(first, first + count):
        epoch, offset = divmod(position, len(items))
        chosen.append(items[_order(len(items), epoch, seed)[offset]])
    return chosen


@lru_cache(maxsize=4)
def _order(count: int, epoch: int, seed: int) -> list[int]:
    order = list(range(count))
    random.Random(derive_seed(seed, "epoch", epoch)).shuffle(order)
    return order
