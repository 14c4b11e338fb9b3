"""What the trajectories of a step did: parts of the reward, searches, crops, tokens, spread of the groups."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from accelerate.utils import gather_object

from rollout.group import Group
from visor.models.smart_resize import FACTOR
from visor.types import Crop, Question, RewardBreakdown, Trajectory

DELTAS_SHOWN = 4
"""Δ from here on is counted together."""


@dataclass
class _Facts:
    """Of one trajectory; plain values, which travel between processes."""

    parts: dict[str, float] | None
    """None = unscored."""
    delta: str | None
    """Key of the Δ distribution; None without gold pages."""
    cropped: bool
    stop: str
    visual_tokens: list[int] = field(default_factory=list)
    """Of each call whose image sizes are known."""
    prompt_tokens: list[int] = field(default_factory=list)
    sampled_tokens: int = 0


def behaviour_metrics(groups: Sequence[Group]) -> dict:
    """Over the trajectories of all processes; None where there is nothing to divide by.

    - reward_parts: mean of each part of the reward over the scored trajectories.
    - reward_std: of the scored rewards; group_reward_std: mean over the groups with two scored or more.
    - delta_counts: trajectories by Δ (VISOR eq. 5), `incomplete` those without all gold pages.
    - crop_rate: share of the trajectories with a crop. stop_reasons: trajectories by how they ended.
    - visual_tokens_per_call, visual_tokens_max: image tokens in the context of a call, mean and peak;
      prompt_tokens_per_call: all tokens of a context; sampled_tokens: the step's.
    """
    facts: list[_Facts] = gather_object(
        [_facts(trajectory, group.question) for group in groups for trajectory in group.trajectories]
    )
    spreads, rewards = _gathered_rewards(groups)
    visual = [count for fact in facts for count in fact.visual_tokens]
    prompts = [count for fact in facts for count in fact.prompt_tokens]
    return {
        "reward_parts": _mean_parts([fact.parts for fact in facts if fact.parts is not None]),
        "reward_std": _standard_deviation(rewards),
        "group_reward_std": _mean(spreads),
        "delta_counts": _counts([fact.delta for fact in facts if fact.delta is not None]),
        "crop_rate": _mean([float(fact.cropped) for fact in facts]),
        "stop_reasons": _counts([fact.stop for fact in facts]),
        "visual_tokens_per_call": _mean(visual),
        "visual_tokens_max": max(visual, default=None),
        "prompt_tokens_per_call": _mean(prompts),
        "sampled_tokens": sum(fact.sampled_tokens for fact in facts),
    }


def reward_parts(reward: RewardBreakdown) -> dict[str, float]:
    """The parts a reward is made of: those it names itself, else those of VISOR's."""
    if reward.parts:
        return dict(reward.parts)
    named = {"retrieval": reward.retrieval, "answer": reward.answer}
    parts = {name: value for name, value in named.items() if value is not None}
    return {**parts, "format_penalty": float(reward.format_penalty)}


def _facts(trajectory: Trajectory, question: Question) -> _Facts:
    reward = trajectory.reward
    completions = [turn.completion for turn in trajectory.turns]
    return _Facts(
        parts=reward_parts(reward) if reward and reward.total is not None else None,
        delta=_delta(reward) if reward and question.gold_page_ids else None,
        cropped=any(isinstance(turn.action, Crop) for turn in trajectory.turns),
        stop=trajectory.stop_reason.value if trajectory.stop_reason else "none",
        visual_tokens=[
            sum(width * height // FACTOR**2 for width, height in completion.image_sizes)
            for completion in completions
            if completion.image_sizes is not None
        ],
        prompt_tokens=[len(c.prompt_token_ids) for c in completions if c.prompt_token_ids is not None],
        sampled_tokens=sum(len(completion.token_ids or []) for completion in completions),
    )


def _delta(reward: RewardBreakdown) -> str:
    if reward.delta is None:
        return "incomplete"
    return str(reward.delta) if reward.delta < DELTAS_SHOWN else f"{DELTAS_SHOWN}+"


def _gathered_rewards(groups: Sequence[Group]) -> tuple[list[float], list[float]]:
    """(standard deviation of each group with two scored or more, all scored rewards), of all processes."""
    local = [[reward for reward in group.rewards if reward is not None] for group in groups]
    everyone: list[list[float]] = gather_object(local)
    spreads = [_standard_deviation(scored) for scored in everyone]
    rewards = [reward for scored in everyone for reward in scored]
    return [spread for spread in spreads if spread is not None], rewards


def _mean_parts(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    values: defaultdict[str, list[float]] = defaultdict(list)
    for part in parts:
        for name, value in part.items():
            values[name].append(value)
    return {name: math.fsum(numbers) / len(numbers) for name, numbers in sorted(values.items())}


def _counts(names: Sequence[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _standard_deviation(values: Sequence[float]) -> float | None:
    """With n − 1; None of fewer than two values."""
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
