"""Rows → micro-batches of similar length, and what padding they carry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rollout.rows import TrainingRow

Item = TypeVar("Item")
MOST_PADDING = 0.1
"""Share of a pass's tokens that may be padding: rows that would bring more get a pass of their own."""


@dataclass(frozen=True)
class MicroBatching(Generic[Item]):
    """How the rows of an update are cut into forward and backward passes."""

    rows: int
    """Most rows of a pass. It has fewer where more would be padding by over `MOST_PADDING`."""
    max_tokens: int | None = None
    """Most tokens of a pass, padding included; a longer row has a pass of its own. None: any number."""

    def split(self, items: Sequence[Item], length: Callable[[Item], int]) -> list[list[Item]]:
        """All items, longest first, so that neighbours need little padding."""
        batches: list[list[Item]] = []
        for item in sorted(items, key=length, reverse=True):
            if not batches or not self._takes([*map(length, batches[-1]), length(item)]):
                batches.append([])
            batches[-1].append(item)
        return batches

    def _takes(self, lengths: Sequence[int]) -> bool:
        """Whether a pass may have rows of these lengths, the longest first."""
        tokens = len(lengths) * lengths[0]
        if len(lengths) > self.rows or (self.max_tokens is not None and tokens > self.max_tokens):
            return False
        return sum(lengths) >= (1 - MOST_PADDING) * tokens


@dataclass
class Padding:
    """Tokens of the passes that were made."""

    tokens: int = 0
    """All, padding included."""
    pads: int = 0

    def add(self, rows: Sequence[TrainingRow]) -> None:
        """Count one pass."""
        lengths = [len(row.input_ids) for row in rows]
        self.tokens += len(lengths) * max(lengths)
        self.pads += len(lengths) * max(lengths) - sum(lengths)

    def __add__(self, other: Padding) -> Padding:
        return Padding(self.tokens + other.tokens, self.pads + other.pads)

    @property
    def share(self) -> float:
        return self.pads / self.tokens if self.tokens else 0.0
