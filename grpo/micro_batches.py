"""Rows → micro-batches of similar length, and what padding they carry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rollout.rows import TrainingRow

Item = TypeVar("Item")


@dataclass(frozen=True)
class MicroBatching(Generic[Item]):
    """How the rows of an update are cut into forward and backward passes."""

    rows: int
    """Most rows of a pass."""
    max_tokens: int | None = None
    """Most tokens of a pass, padding included; a longer row has a pass of its own. None: any number."""

    def split(self, items: Sequence[Item], length: Callable[[Item], int]) -> list[list[Item]]:
        """All items, longest first, so that neighbours need little padding."""
        batches: list[list[Item]] = []
        for item in sorted(items, key=length, reverse=True):
            if not batches or self._is_full(len(batches[-1]), length(batches[-1][0])):
                batches.append([])
            batches[-1].append(item)
        return batches

    def _is_full(self, count: int, longest: int) -> bool:
        if count == self.rows:
            return True
        return self.max_tokens is not None and (count + 1) * longest > self.max_tokens


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
