"""Groups of trajectories → training rows with advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from grpo.advantage import ScaleRewards, group_advantages, is_degenerate
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
    groups_dropped: int = 0
    """Groups without a gradient: all scored rewards equal, or fewer than two scored."""
    unscored: int = 0
    """Trajectories without a reward: in neither the group's statistics nor the loss."""
    rowless: int = 0
    """Scored trajectories without a trained token, or whose rows are all over the length limit."""
    rows_over_length: int = 0
    """Rows left out because they are over the length limit and cannot be cut."""


def rows_of_groups(
    groups: Sequence[Group],
    build_rows: BuildRows,
    *,
    max_length: int | None = None,
    scale_rewards: ScaleRewards = "group",
    batch_rewards: Sequence[float | None] | None = None,
    mask_truncated_completions: bool = False,
) -> StepRows:
    """Rows of a step's groups, the trajectory's advantage on each of its rows.

    Rows over `max_length` tokens are left out and counted. `batch_rewards` are those of the groups of all
    processes, for `scale_rewards="batch"`; None = those of `groups`. The advantage also goes into
    `trajectory.meta["advantage"]`, so that it is recorded.
    """
    step = StepRows(groups=len(groups))
    if batch_rewards is None:
        batch_rewards = [reward for group in groups for reward in group.rewards]
    for group in groups:
        step.groups_dropped += is_degenerate(group.rewards)
        advantages = group_advantages(group.rewards, scale_rewards, batch_rewards)
        for trajectory, advantage in zip(group.trajectories, advantages):
            trajectory.meta["advantage"] = advantage
            if advantage is None:
                step.unscored += 1
                continue
            excluded = mask_truncated_completions and is_truncated(trajectory)
            fitting, too_long = _fitting_rows(trajectory, build_rows, max_length)
            step.rows_over_length += too_long
            rows = [PolicyRow(row, excluded) for row in fitting if any(row.loss_mask)]
            for item in rows:
                item.row.advantage = advantage
            step.rowless += not rows
            step.rows += rows
    return step


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
