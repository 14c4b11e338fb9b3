"""Groups of trajectories → training rows with advantages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from grpo.advantage import NoGradient, ScaleRewards, group_advantages, is_degenerate, without_gradient
from rollout.group import Group
from rollout.rows import RowTooLong, TrainingRow
from visor.types import FinishReason, StopReason, Trajectory

BuildRows = Callable[[Trajectory], list[TrainingRow]]
"""The rows of one trajectory: one over the whole of it, or one a turn. May raise RowTooLong for a row that
cannot be cut to length."""


@dataclass
class PolicyRow:
    """A row of the policy loss."""

    row: TrainingRow
    excluded: bool = False
    """True: its reply was cut and `mask_truncated_completions` keeps it out of the loss."""

    @property
    def tokens(self) -> int:
        """Trained tokens."""
        return sum(self.row.loss_mask)

    @property
    def sampled_logprobs(self) -> list[float] | None:
        return self.row.old_logprobs


@dataclass
class StepRows:
    rows: list[PolicyRow] = field(default_factory=list)
    groups: int = 0
    dropped: Counter[NoGradient] = field(default_factory=Counter)
    """Groups without a gradient, by reason."""
    unscored: int = 0
    """Trajectories without a reward: in neither the group's statistics nor the loss."""
    rowless: int = 0
    """Scored trajectories without a trained token, or whose rows are all over the length limit."""
    rows_over_length: int = 0
    """Rows left out because they are over the length limit and cannot be cut."""

    @property
    def groups_dropped(self) -> int:
        return self.dropped.total()


def rows_of_groups(
    groups: Sequence[Group],
    build_rows: BuildRows,
    *,
    max_length: int | None = None,
    scale_rewards: ScaleRewards = "group",
    batch_rewards: Sequence[float | None] | None = None,
    mask_truncated_completions: bool = False,
    filter_zero_std_groups: bool = False,
) -> StepRows:
    """Rows of a step's groups, the trajectory's advantage on each of its rows.

    Groups without a gradient keep their place in the token mean (and in a KL term), or with
    `filter_zero_std_groups` give no rows at all; their trajectories say why under `meta["no_gradient"]`.

    Rows over `max_length` tokens are left out and counted. `batch_rewards` are those of the groups of all
    processes, for `scale_rewards="batch"`; None = those of `groups`. The advantage also goes into
    `trajectory.meta["advantage"]`, so that it is recorded.
    """
    step = StepRows(groups=len(groups))
    if batch_rewards is None:
        batch_rewards = rewards_to_scale_by(groups, filter_zero_std_groups)
    for group in groups:
        reason = without_gradient(group.rewards)
        if reason:
            step.dropped[reason] += 1
        advantages = group_advantages(group.rewards, scale_rewards, batch_rewards)
        for trajectory, advantage in zip(group.trajectories, advantages):
            trajectory.meta["advantage"] = advantage
            if reason:
                trajectory.meta["no_gradient"] = reason
            if advantage is None:
                step.unscored += 1
                continue
            if reason and filter_zero_std_groups:
                continue
            excluded = mask_truncated_completions and is_truncated(trajectory)
            fitting, too_long = _fitting_rows(trajectory, build_rows, max_length)
            step.rows_over_length += too_long
            rows = [PolicyRow(row, excluded) for row in fitting if any(row.loss_mask)]
            for item in rows:
                item.row.advantage = advantage
                check_policy_row(item.row)
            step.rowless += not rows
            step.rows += rows
    return step


def rewards_to_scale_by(groups: Sequence[Group], filter_zero_std_groups: bool) -> list[float | None]:
    """The rewards of the groups that are trained, for `scale_rewards="batch"`."""
    kept = [group for group in groups if not (filter_zero_std_groups and is_degenerate(group.rewards))]
    return [reward for group in kept for reward in group.rewards]


def check_policy_row(row: TrainingRow) -> None:
    """Assert what a row of the policy loss must satisfy beside `rollout.rows.check_row`: its advantage is a
    finite number, its ids came as ids from the engine, and a turn row, which is scored under the context it
    was sampled in, has the log-probabilities of its sampling. AssertionError naming the trajectory."""
    name = row.trajectory if row.turn_index is None else f"{row.trajectory} turn {row.turn_index}"
    assert math.isfinite(row.advantage), f"{name}: its advantage is {row.advantage}"
    assert not row.retokenised, (
        f"{name}: a reply came as text only and was tokenised again, so its ids are not those sampled; "
        "train with an engine that gives token ids"
    )
    assert row.turn_index is None or row.old_logprobs is not None, (
        f"{name}: it has no log-probabilities of its sampling; train with an engine that gives them"
    )


def _fitting_rows(
    trajectory: Trajectory, build_rows: BuildRows, max_length: int | None
) -> tuple[list[TrainingRow], int]:
    """The rows of a trajectory within the limit, and the number of those over it."""
    try:
        rows = build_rows(trajectory)
    except RowTooLong:
        return [], 1
    fitting = [row for row in rows if max_length is None or len(row.input_ids) <= max_length]
    return fitting, len(rows) - len(fitting)


def is_truncated(trajectory: Trajectory) -> bool:
    """True when a reply was cut at its token limit, or the context outgrew the model."""
    return trajectory.stop_reason == StopReason.LENGTH or any(
        turn.completion.finish_reason == FinishReason.LENGTH for turn in trajectory.turns
    )
