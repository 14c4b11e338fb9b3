"""Ranked pages in the form of byaldi, a common wrapper of late interaction: doc_id, page_num, score."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from visor.retrieval.base import ScoredPage
from visor.types import split_page_id


@dataclass(frozen=True)
class Result:
    """A hit under byaldi's field names."""

    doc_id: str
    page_num: int
    """1-based."""
    score: float
    metadata: dict[str, Any] = field(default_factory=dict)
    base64: str | None = None
    """The page image is not part of an index."""

    def dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def as_results(hits: Iterable[ScoredPage]) -> list[Result]:
    """The hits in order."""
    return [Result(*split_page_id(hit.page_id), hit.score) for hit in hits]
