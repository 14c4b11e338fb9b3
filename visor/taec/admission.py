"""Evidence admission: which candidates of a retrieval enter the context (TAEC, eq. 2 and appendix A.3)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from visor.taec.text import jaccard, occurs, tokens
from visor.types import page_sort_key

Redundancy = Literal["max", "sum"]


@dataclass(frozen=True)
class Candidate:
    """A page the retriever returned."""

    page_id: str
    score: float
    """As the retriever gave it, any scale."""
    text: str
    """Caption of the page, or what stands in for it."""


@dataclass(frozen=True)
class Coefficients:
    """Weights of the three terms; the paper prints none, the defaults are ours."""

    alpha: float = 1.0
    """α_A, coverage."""
    beta: float = 0.5
    """β_A, relevance."""
    eta: float = 0.5
    """η_A, redundancy."""
    redundancy: Redundancy = "max"
    """max: the largest similarity to a selected page (as the paper ran it). sum: over all of them, eq. 2."""


@dataclass(frozen=True)
class Gain:
    """The parts of one candidate's gain, each already multiplied by its coefficient."""

    coverage: float
    relevance: float
    redundancy: float
    """Subtracted."""

    @property
    def total(self) -> float:
        return self.coverage + self.relevance - self.redundancy

    def record(self) -> dict[str, float]:
        """Plain numbers for a trajectory's record."""
        return {key: round(value, 6) for key, value in (asdict(self) | {"total": self.total}).items()}


def min_max(scores: Sequence[float]) -> list[float]:
    """Scores moved to [0, 1] over the pool; all 1 when they are equal (none is worse)."""
    if not scores:
        return []
    low, high = min(scores), max(scores)
    return [(score - low) / (high - low) if high > low else 1.0 for score in scores]


def gain(
    text: str,
    relevance: float,
    selected: Sequence[str],
    open_weights: Mapping[str, float],
    coefficients: Coefficients,
) -> Gain:
    """Marginal gain of adding a page to the selected ones.

    `text`: caption of the page; `relevance`: its normalised score b_i; `selected`: captions of the pages
    in S; `open_weights`: w̄_u of each slot. Coverage counts the slots that occur in the caption and in no
    selected one. With redundancy `sum` this is the difference that eq. 2 makes between S ∪ {i} and S.
    """
    coverage = math.fsum(
        weight
        for slot, weight in open_weights.items()
        if occurs(slot, text) and not any(occurs(slot, other) for other in selected)
    )
    own = tokens(text)
    similarities = [jaccard(own, tokens(other)) for other in selected]
    combine = math.fsum if coefficients.redundancy == "sum" else lambda values: max(values, default=0.0)
    return Gain(
        coverage=coefficients.alpha * coverage,
        relevance=coefficients.beta * relevance,
        redundancy=coefficients.eta * combine(similarities),
    )


def admit(
    candidates: Sequence[Candidate],
    k: int,
    open_weights: Mapping[str, float],
    coefficients: Coefficients,
    *,
    selected: Sequence[str] = (),
    anchor: bool = True,
) -> list[tuple[Candidate, Gain]]:
    """Choose up to `k` candidates greedily and return them with their gains, in the order chosen.

    `selected` are the captions of pages already in S. With `anchor` the retriever's best candidate goes
    first whatever its gain (section 3.2). Candidates are ordered by score and page before anything else and
    equal gains go to the earlier one, so that the order they arrive in changes nothing.
    """
    pool = sorted(candidates, key=lambda candidate: (-candidate.score, page_sort_key(candidate.page_id)))
    relevance = dict(zip((candidate.page_id for candidate in pool), min_max([c.score for c in pool])))
    assert len(relevance) == len(pool), "a page stands twice among the candidates"
    texts = list(selected)
    chosen: list[tuple[Candidate, Gain]] = []
    while pool and len(chosen) < k:
        eligible = pool[:1] if anchor and not chosen else pool
        gains = [gain(c.text, relevance[c.page_id], texts, open_weights, coefficients) for c in eligible]
        best = max(range(len(gains)), key=lambda index: (gains[index].total, -index))
        candidate = pool.pop(best)
        texts.append(candidate.text)
        chosen.append((candidate, gains[best]))
    return chosen
