"""Groups of samples for GRPO: several trajectories of one question, to be compared with each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rollout.engine import EpisodeJob, RolloutEngine
from visor.types import Question, Trajectory, derive_seed


@dataclass
class Group:
    """One question and its samples, scored, in sample order."""

    question: Question
    trajectories: list[Trajectory]

    @property
    def rewards(self) -> list[float | None]:
        """One a sample; None = unscored (leaves the group's statistics and the loss)."""
        return [t.reward.total if t.reward else None for t in self.trajectories]


def sample_groups(
    engine: RolloutEngine,
    questions: Sequence[Question],
    group_size: int,
    run_seed: int,
    step: int,
    earlier: Counter[str] | None = None,
) -> list[Group]:
    """Sample `group_size` trajectories a question, all concurrently; groups come in question order.

    Seeds follow from (run seed, step, question id, sample index, turn) alone. A question that stands in
    the step twice gets fresh sample indices the second time, so that its groups differ; `earlier` counts the
    groups of each question and carries that over the calls of one step.
    """
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size}")
    seed = derive_seed(run_seed, step)
    earlier = Counter() if earlier is None else earlier
    jobs = []
    for question in questions:
        first = earlier[question.question_id] * group_size
        earlier[question.question_id] += 1
        jobs += [EpisodeJob(question, seed, first + i) for i in range(group_size)]
    trajectories = engine.run(jobs)
    return [
        Group(question, trajectories[i * group_size : (i + 1) * group_size])
        for i, question in enumerate(questions)
    ]
