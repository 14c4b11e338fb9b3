"""The groups of one step: questions from the data order, and more of them for groups without a gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from accelerate.utils import gather_object

from grpo.advantage import is_degenerate
from grpo.schedule import items_from
from rollout.engine import RolloutEngine
from rollout.group import Group, sample_groups
from visor.stage_clock import CLOCK
from visor.types import Question


@dataclass
class StepGroups:
    """What a step sampled."""

    groups: list[Group] = field(default_factory=list)
    """Of this process, in the order they were drawn, those without a gradient included."""
    drawn: int = 0
    """Questions drawn for the step by all processes: the data order goes on after them."""
    rounds: int = 0
    """Rounds of resampling, 0 when the first draw sufficed."""
    missing: int = 0
    """Groups short of questions_per_step after the last round, of all processes; 0 without a filter."""


class GroupSampler:
    """Draws questions and samples their groups, shared out over the processes.

    With `filter_zero_std_groups`, groups without a gradient are made up for by further questions, as many as
    are missing, in at most `max_resampling_rounds` rounds (DAPO's dynamic sampling, arXiv:2503.14476, section
    3.2, with a bound). Every process knows the kept groups of all, so all draw the same questions and stop
    after the same round. What is sampled depends on the data order and the seeds alone, not on the number of
    processes.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        questions: Sequence[Question],
        *,
        questions_per_step: int,
        num_generations: int,
        seed: int,
        filter_zero_std_groups: bool = False,
        max_resampling_rounds: int = 0,
        process_index: int = 0,
        num_processes: int = 1,
    ) -> None:
        self.engine = engine
        self.questions = questions
        self.questions_per_step = questions_per_step
        self.num_generations = num_generations
        self.seed = seed
        self.filter_zero_std_groups = filter_zero_std_groups
        self.max_resampling_rounds = max_resampling_rounds
        self.process_index = process_index
        self.num_processes = num_processes

    def sample(self, step: int, first: int) -> StepGroups:
        """The groups of a step whose questions begin at place `first` (0-based) of the data order."""
        sampled = StepGroups()
        owner: dict[str, int] = {}
        earlier: Counter[str] = Counter()
        wanted = self.questions_per_step
        while True:
            questions = items_from(self.questions, first + sampled.drawn, wanted, self.seed)
            share = self._share(questions, sampled.drawn, owner)
            sampled.drawn += wanted
            sampled.groups += sample_groups(
                self.engine, share, self.num_generations, self.seed, step, earlier
            )
            if not self.filter_zero_std_groups:
                return sampled
            mine = sum(not is_degenerate(group.rewards) for group in sampled.groups)
            with CLOCK.running("gather"):
                sampled.missing = wanted = self.questions_per_step - sum(gather_object([mine]))
            if not wanted or sampled.rounds == self.max_resampling_rounds:
                return sampled
            sampled.rounds += 1

    def _share(self, questions: Sequence[Question], drawn: int, owner: dict[str, int]) -> list[Question]:
        """This process's part. A question drawn twice in a step, in whichever round, goes to one process,
        which numbers its samples on instead of repeating them."""
        for position, question in enumerate(questions, start=drawn):
            owner.setdefault(question.question_id, position % self.num_processes)
        return [question for question in questions if owner[question.question_id] == self.process_index]
