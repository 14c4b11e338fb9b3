"""How good a ranking is: NDCG@k and recall@k against gold pages, which are right or not (binary relevance).

A ranking names page ids, best first. A page counts once, at the first rank it has, and gold pages are a set,
so no value is above 1. A question without gold pages has no value: it is left out of the mean and counted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


def ndcg(ranked: Sequence[str], gold: Collection[str], k: int) -> float | None:
    """Normalised discounted cumulative gain of the first `k` distinct pages, in [0, 1]; None without gold.

    DCG = Σ 1/log2(rank + 1) over the ranks (from 1) of gold pages, divided by that of a ranking with the gold
    pages first (Järvelin & Kekäläinen 2002, binary gains). ValueError for `k` below 1.
    """
    wanted = set(gold)
    if not wanted:
        return None
    gain = sum(_discount(rank) for rank, page in _first(ranked, k) if page in wanted)
    return gain / sum(_discount(rank) for rank in range(1, min(k, len(wanted)) + 1))


def recall(ranked: Sequence[str], gold: Collection[str], k: int) -> float | None:
    """Share of the gold pages among the first `k` distinct pages, in [0, 1]; None without gold.

    With more than `k` gold pages the best possible value is below 1. ValueError for `k` below 1.
    """
    wanted = set(gold)
    if not wanted:
        return None
    return sum(page in wanted for _, page in _first(ranked, k)) / len(wanted)


@dataclass(frozen=True)
class Mean:
    """The mean of a measure over questions."""

    value: float | None
    """None when no question has a value."""
    n: int
    """Questions in the mean."""
    undefined: int
    """Questions without gold pages, left out."""


def mean(values: Iterable[float | None]) -> Mean:
    """Average the values that are defined, and count the others."""
    values = list(values)
    defined = [value for value in values if value is not None]
    average = math.fsum(defined) / len(defined) if defined else None
    return Mean(average, len(defined), len(values) - len(defined))


def _first(ranked: Sequence[str], k: int) -> Iterable[tuple[int, str]]:
    """(rank, page) of the first `k` distinct pages, ranks from 1."""
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    return enumerate(list(dict.fromkeys(ranked))[:k], start=1)


def _discount(rank: int) -> float:
    return 1 / math.log2(rank + 1)
