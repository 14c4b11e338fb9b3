"""Evidence admission: which candidates of a retrieval enter the context (TAEC, eq. 2 and appendix A.3)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from visor.taec.text import normalise, tokens
from visor.types import page_sort_key

Redundancy = Literal["max", "sum"]
TIE_DECIMALS = 12
"""Gains that differ by the rounding of their sums only are equal."""


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


class Selection:
    """S of eq. 2 as it grows, and what each further page would add.

    What a page brings (its slots, its tokens) is read once, and a page that enters S is compared with each
    candidate once, over the tokens they share.
    """

    def __init__(
        self, texts: Sequence[str], open_weights: Mapping[str, float], coefficients: Coefficients
    ) -> None:
        """`texts`: captions of the candidates; `open_weights`: w̄_u of each slot."""
        self._weights = open_weights
        self._coefficients = coefficients
        self._needles = [(slot, normalise(slot)) for slot in open_weights]
        self._sizes: list[int] = []
        """Tokens of each candidate."""
        holders: dict[str, list[int]] = defaultdict(list)
        for index, text in enumerate(texts):
            own = tokens(text)
            self._sizes.append(len(own))
            for token in own:
                holders[token].append(index)
        self._holders = dict(holders)
        """Candidates that hold a token."""
        self._slots = [self._occurring(text) for text in texts]
        self._similarities: list[list[float]] = [[] for _ in texts]
        self._covered: set[str] = set()

    def _occurring(self, text: str) -> list[str]:
        normal = normalise(text)
        return [slot for slot, needle in self._needles if needle in normal]

    def add(self, text: str) -> None:
        """Take a page into S."""
        self._covered.update(self._occurring(text))
        own = tokens(text)
        shared = [0] * len(self._sizes)
        for token in own:
            for index in self._holders.get(token, ()):
                shared[index] += 1
        for similarities, size, common in zip(self._similarities, self._sizes, shared):
            # The Jaccard index, as `visor.taec.text.jaccard` has it.
            similarities.append(common / (size + len(own) - common) if common else 0.0)

    def gain(self, index: int, relevance: float) -> Gain:
        """Marginal gain of candidate `index` with normalised score b_i = `relevance`."""
        coefficients, similarities = self._coefficients, self._similarities[index]
        coverage = math.fsum(self._weights[s] for s in self._slots[index] if s not in self._covered)
        if coefficients.redundancy == "sum":
            redundancy = math.fsum(similarities)
        else:
            redundancy = max(similarities, default=0.0)
        return Gain(
            coverage=coefficients.alpha * coverage,
            relevance=coefficients.beta * relevance,
            redundancy=coefficients.eta * redundancy,
        )


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
    selection = Selection([text], open_weights, coefficients)
    for other in selected:
        selection.add(other)
    return selection.gain(0, relevance)


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
    equal gains (to 12 decimals) go to the earlier one, so that the order they arrive in changes nothing.
    """
    pool = sorted(candidates, key=lambda candidate: (-candidate.score, page_sort_key(candidate.page_id)))
    assert len({candidate.page_id for candidate in pool}) == len(pool), "a page stands twice among them"
    relevance = min_max([candidate.score for candidate in pool])
    selection = Selection([candidate.text for candidate in pool], open_weights, coefficients)
    for text in selected:
        selection.add(text)
    waiting = list(range(len(pool)))
    chosen: list[tuple[Candidate, Gain]] = []
    while waiting and len(chosen) < k:
        eligible = waiting[:1] if anchor and not chosen else waiting
        gains = {index: selection.gain(index, relevance[index]) for index in eligible}
        best = max(eligible, key=lambda index: (round(gains[index].total, TIE_DECIMALS), -index))
        waiting.remove(best)
        selection.add(pool[best].text)
        chosen.append((pool[best], gains[best]))
    return chosen
