"""Two rankings made one by reciprocal-rank fusion (Cormack, Clarke and Büttcher 2009).

    score(page) = Σ over the rankings that name it of 1 / (60 + its rank), ranks from 1

Only ranks count, so that scores of different kinds need no common scale.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from visor.retrieval.base import BatchRetriever, Query, ScoredPage, rank

CONSTANT = 60
"""k of the paper."""
DEPTH = 100
"""Pages asked of each part."""
DEFAULT_PARTS = ("bm25", "dense")


def hybrid_parts(name: str) -> tuple[str, str] | None:
    """The two retrievers that `hybrid:FIRST+SECOND` names; `hybrid` alone is bm25 and dense.

    None for the name of no hybrid; ValueError for one that does not name two different retrievers.
    """
    if name == "hybrid":
        return DEFAULT_PARTS
    if not name.startswith("hybrid:"):
        return None
    parts = re.fullmatch(r"hybrid:([\w-]+)\+([\w-]+)", name)
    if parts is None or parts[1] == parts[2]:
        raise ValueError(f"{name!r} does not name two retrievers; write it as hybrid:bm25+dense")
    return parts[1], parts[2]


class HybridRetriever:
    """Fuses two retrievers over the same pages.

    Each part gives its best `depth` pages (k, when more are asked for) with the query's exclusions and
    document filter applied; a page outside both lists is no result. Ties are broken by page.
    """

    def __init__(self, first: BatchRetriever, second: BatchRetriever, depth: int = DEPTH):
        if depth < 1:
            raise ValueError(f"the depth of a fusion is 1 or more, got {depth}")
        self.parts = (first, second)
        self.depth = depth
        self.name = f"hybrid:{first.name}+{second.name}"

    def search(self, query: str, k: int) -> list[ScoredPage]:
        """The best `k` pages of either part, by fused score."""
        return self.search_batch([Query(query, k)])[0]

    def search_batch(self, queries: Sequence[Query]) -> list[list[ScoredPage]]:
        """The pages of each query; see `search`."""
        deep = [replace(query, k=max(query.k, self.depth) if query.k else 0) for query in queries]
        rankings = [part.search_batch(deep) for part in self.parts]
        return [fuse(lists, query.k) for query, *lists in zip(queries, *rankings, strict=True)]


def fuse(rankings: Iterable[Sequence[ScoredPage]], k: int) -> list[ScoredPage]:
    """The best `k` pages of several rankings by reciprocal rank."""
    scores: dict[str, float] = {}
    for ranking in rankings:
        for position, hit in enumerate(ranking, start=1):
            scores[hit.page_id] = scores.get(hit.page_id, 0.0) + 1 / (CONSTANT + position)
    return rank((ScoredPage(page_id, score) for page_id, score in scores.items()), k)
