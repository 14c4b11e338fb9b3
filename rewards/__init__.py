"""Trajectory → reward. A reward is a pure function of (trajectory, question, judgement)."""

from __future__ import annotations

from collections.abc import Callable

from rewards.combine import Judgement, visor_reward
from visor.types import Question, RewardBreakdown, Trajectory

RewardFunction = Callable[[Trajectory, Question, Judgement], RewardBreakdown]

REWARDS: dict[str, RewardFunction] = {"visor": visor_reward}
"""Rewards by the name that a configuration gives them."""
