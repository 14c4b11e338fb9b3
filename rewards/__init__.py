"""Trajectory → reward: the judge is asked, then the reward is a pure function of what it said.

A new reward is a module of this folder and a line in `REWARDS`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rewards.combine import ascore
from rewards.judge import Judge
from rewards.vrag import vrag_ascore
from visor.types import Question, RewardBreakdown, Trajectory

Reward = Callable[[Trajectory, Question, Judge], Awaitable[RewardBreakdown]]

REWARDS: dict[str, Reward] = {"visor": ascore, "vrag": vrag_ascore}
"""Rewards by the name that a configuration gives them."""


def get_reward(name: str) -> Reward:
    """The reward of a name; ValueError naming the known ones."""
    if name not in REWARDS:
        raise ValueError(f"unknown reward {name!r}; known: {', '.join(sorted(REWARDS))}")
    return REWARDS[name]
