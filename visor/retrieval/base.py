"""What a retriever is: queries in, ranked pages out.

Every retriever gives the same promises: scores descend, ties are broken by page (document, then number), a
page is named once, and a list is never filled up to k with pages that do not match.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from visor.types import page_sort_key

REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class ScoredPage:
    page_id: str
    score: float


@dataclass(frozen=True)
class Query:
    """One search: what to look for, how many pages, and which pages may be returned."""

    text: str
    """Half a surrogate pair in it becomes U+FFFD: no encoder and no connection can take it as it is."""
    k: int
    """At most this many pages; 0 or more."""
    exclude_page_ids: frozenset[str] = frozenset()
    """Pages not to return (those a reader has seen); they are left out before the best k are taken. Ids that
    the index does not hold are ignored."""
    doc_ids: frozenset[str] | None = None
    """Return pages of these documents only; None = of all."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", clean_text(self.text))
        if self.k < 0:
            raise ValueError(f"k must be 0 or more, got {self.k}")


class Retriever(Protocol):
    """What an episode needs."""

    name: str

    def search(self, query: str, k: int) -> list[ScoredPage]:
        """The best `k` pages or fewer, scores descending, ties broken by page (document, then number)."""
        ...


class BatchRetriever(Retriever, Protocol):
    """What every retriever of this package is: many searches are scored at once, each as if it were alone."""

    def search_batch(self, queries: Sequence[Query]) -> list[list[ScoredPage]]:
        """The pages of each query, in the order of the queries."""
        ...


def clean_text(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, which UTF-8 cannot carry."""
    if text.isascii():
        return text
    return "".join(REPLACEMENT if "\ud800" <= character <= "\udfff" else character for character in text)


def rank(scored: Iterable[ScoredPage], k: int) -> list[ScoredPage]:
    """Order by score, ties by page, and keep `k`."""
    return sorted(scored, key=lambda hit: (-hit.score, page_sort_key(hit.page_id)))[:k]
