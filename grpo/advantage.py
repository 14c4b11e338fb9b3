"""Group-relative advantages (DeepSeekMath, arXiv:2402.03300, section 4.1.2, outcome supervision)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

ScaleRewards = Literal["group", "batch", "none"]
NoGradient = Literal["all_equal", "unscored", "too_few_scored"]
"""Why a group has no gradient: its scored rewards are all equal, none is scored, or a single one is."""
NO_GRADIENT: tuple[NoGradient, ...] = get_args(NoGradient)

EQUAL_WITHIN = 1e-6
"""Rewards of a group closer together than this are equal: the residue of a sum is not a signal, and dividing
it by its own standard deviation would make it one."""


def group_advantages(
    rewards: Sequence[float | None],
    scale_rewards: ScaleRewards = "group",
    batch_rewards: Sequence[float | None] | None = None,
) -> list[float | None]:
    """Return the advantage of each sample of one group, in order.

    `rewards` has one entry a sample of the same question; None = unscored. An unscored sample enters neither
    the mean nor the standard deviation and gets None, so that it cannot enter the loss either.

    A = (r − mean) / std with `scale_rewards="group"`, A = r − mean with "none" (Dr. GRPO, arXiv:2503.20783);
    "batch" divides by the std of `batch_rewards`, the rewards of all groups trained together (the group's own
    without them). std is the sample standard deviation (n − 1), as in TRL; no constant is added to it. A
    group whose scored rewards are all equal, or that has a single one, gets exactly 0. Computed in double
    precision; the order of `batch_rewards` does not matter.
    """
    scored = [float(reward) for reward in rewards if reward is not None]
    if not all(math.isfinite(reward) for reward in scored):
        raise ValueError(f"a reward is not a finite number: {list(rewards)}; use None for an unscored sample")
    if is_degenerate(rewards):
        return [None if reward is None else 0.0 for reward in rewards]
    mean = math.fsum(scored) / len(scored)
    scale = 1.0
    if scale_rewards == "group" or (scale_rewards == "batch" and batch_rewards is None):
        scale = _standard_deviation(scored)
    elif scale_rewards == "batch":
        assert batch_rewards is not None
        scale = _standard_deviation([float(reward) for reward in batch_rewards if reward is not None])
    return [None if reward is None else (reward - mean) / scale for reward in rewards]


def _standard_deviation(values: Sequence[float]) -> float:
    """With n − 1; sums are exact, so that the order of the values leaves no trace."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def is_degenerate(rewards: Sequence[float | None]) -> bool:
    """True when the group has no gradient: fewer than two scored samples, or all of them equal."""
    return without_gradient(rewards) is not None


def without_gradient(rewards: Sequence[float | None]) -> NoGradient | None:
    """Why a group has no gradient; None when it has one."""
    scored = [reward for reward in rewards if reward is not None]
    if not scored:
        return "unscored"
    if len(scored) == 1:
        return "too_few_scored"
    return "all_equal" if max(scored) - min(scored) < EQUAL_WITHIN else None
