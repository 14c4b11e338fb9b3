"""What a retriever is: a query in, ranked pages out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from visor.types import page_sort_key


@dataclass(frozen=True)
class ScoredPage:
    page_id: str
    score: float


class Retriever(Protocol):
    name: str

    def search(self, query: str, k: int) -> list[ScoredPage]:
        """The best `k` pages or fewer, scores descending, ties broken by page (document, then number)."""
        ...


def rank(scored: Iterable[ScoredPage], k: int) -> list[ScoredPage]:
    """Order by score, ties by page, and keep `k`."""
    return sorted(scored, key=lambda hit: (-hit.score, page_sort_key(hit.page_id)))[:k]
