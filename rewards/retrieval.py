"""The retrieval reward (VISOR eq. 5)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from visor.types import Search, Trajectory

INCOMPLETE = -1.0
UNVERIFIED = -0.5
VERIFIED = 0.0
PER_EXTRA_SEARCH = -0.1


@dataclass(frozen=True)
class RetrievalOutcome:
    """How far the searches of a trajectory got."""

    searches: int
    """T: search turns carried out, those that found nothing new included."""
    complete_at: int | None
    """t*: the search turn, from 1, by which every gold page had been shown; None = incomplete or no gold."""

    @property
    def delta(self) -> int | None:
        """Δ = T − t*; None when retrieval is incomplete."""
        return None if self.complete_at is None else self.searches - self.complete_at


def retrieval_outcome(trajectory: Trajectory, gold_page_ids: Iterable[str]) -> RetrievalOutcome:
    """Count the search turns and find the one at which the last gold page was shown."""
    missing = set(gold_page_ids)
    has_gold = bool(missing)
    searches, complete_at = 0, None
    for turn in trajectory.turns:
        if not isinstance(turn.action, Search):
            continue
        searches += 1
        if turn.observation:
            missing.difference_update(turn.observation.page_ids)
        if has_gold and not missing and complete_at is None:
            complete_at = searches
    return RetrievalOutcome(searches, complete_at)


def retrieval_reward(delta: int | None) -> float:
    """r_ret of eq. 5: −1 incomplete (`delta` None), −0.5 at Δ = 0, 0 at Δ = 1, −0.1·Δ from Δ = 2 on."""
    if delta is None:
        return INCOMPLETE
    if delta < 2:
        return VERIFIED if delta else UNVERIFIED
    return PER_EXTRA_SEARCH * delta
