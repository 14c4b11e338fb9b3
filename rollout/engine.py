"""Many episodes at once: run, score, hand back in job order."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rewards.combine import ascore
from rewards.judge import Judge
from visor.stage_clock import CLOCK
from visor.types import Question, RewardBreakdown, Trajectory

Scorer = Callable[[Trajectory, Question, Judge], "RewardBreakdown | Awaitable[RewardBreakdown]"]
"""A function of (trajectory, question, judge); a plain one runs in a thread, so that its judge may wait."""

SCORING_BACKLOG = 3
"""Trajectories that may wait for their score, as a multiple of the episodes at once; more hold up episodes,
so that a slow judge does not fill the memory."""


class System(Protocol):
    """Anything that answers questions: `visor.systems`."""

    name: str

    async def solve(self, question: Question, *, seed: int = 0, sample_index: int = 0) -> Trajectory: ...


@dataclass(frozen=True)
class EpisodeJob:
    """One question to be answered once."""

    question: Question
    seed: int = 0
    sample_index: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """What its row is filed under."""
        return self.question.question_id, self.sample_index


OnDone = Callable[[EpisodeJob, Trajectory], None]


class RolloutEngine:
    """Runs jobs concurrently, each at its own pace: an episode never waits for another one's turn.

    Requests that happen to wait together are batched by the policy client.
    """

    def __init__(
        self, system: System, judge: Judge, scorer: Scorer = ascore, max_concurrency: int = 64
    ) -> None:
        if max_concurrency < 1:
            raise ValueError(f"max_concurrency must be at least 1, got {max_concurrency}")
        self.system = system
        self.judge = judge
        self.scorer = scorer
        self.max_concurrency = max_concurrency

    def run(self, jobs: Sequence[EpisodeJob], on_done: OnDone | None = None) -> list[Trajectory]:
        """Run all jobs and return their scored trajectories in job order.

        `on_done` is called with each one as soon as it is scored, in the order they finish; an exception
        it raises (a full disk) ends the run.
        """
        return asyncio.run(self.arun(jobs, on_done))

    async def arun(self, jobs: Sequence[EpisodeJob], on_done: OnDone | None = None) -> list[Trajectory]:
        """`run` for a caller with an event loop."""
        done: dict[int, Trajectory] = {}

        def keep(position: int, trajectory: Trajectory) -> None:
            if on_done:
                on_done(jobs[position], trajectory)
            done[position] = trajectory

        await self._run_all(jobs, keep)
        return [done[position] for position in range(len(jobs))]

    def run_each(
        self, jobs: Sequence[EpisodeJob], on_done: OnDone, enough: Callable[[], bool] = lambda: False
    ) -> None:
        """`run` that keeps no trajectory: for an evaluation too large for the memory.

        Once `enough` says so, no further job is started; those under way are finished.
        """

        def finish(position: int, trajectory: Trajectory) -> None:
            on_done(jobs[position], trajectory)

        asyncio.run(self._run_all(jobs, finish, enough))

    async def _run_all(
        self,
        jobs: Sequence[EpisodeJob],
        finish: Callable[[int, Trajectory], None],
        enough: Callable[[], bool] = lambda: False,
    ) -> None:
        slots = asyncio.Semaphore(self.max_concurrency)
        unfinished = asyncio.Semaphore(self.max_concurrency * (1 + SCORING_BACKLOG))

        async def one(position: int, job: EpisodeJob) -> None:
            async with unfinished:
                async with slots:
                    if enough():
                        return
                    CLOCK.progress(f"question {job.question.question_id}, sample {job.sample_index} begins")
                    trajectory = await self.system.solve(
                        job.question, seed=job.seed, sample_index=job.sample_index
                    )
                # Outside the slot: a judge that takes its time holds up no episode.
                trajectory.reward = await self.score(trajectory, job.question)
            finish(position, trajectory)

        try:
            async with asyncio.TaskGroup() as group:
                for position, job in enumerate(jobs):
                    group.create_task(one(position, job))
        except BaseExceptionGroup as failures:
            # The tasks are cancelled by now; the caller gets the plain exception, not a group of one.
            raise failures.exceptions[0] from None

    async def score(self, trajectory: Trajectory, question: Question) -> RewardBreakdown:
        """Score one trajectory; a scorer that raises leaves it unscored, with the reason."""
        try:
            with CLOCK.waiting("judge", _name(trajectory)):
                asked = (trajectory, question, self.judge)
                if inspect.iscoroutinefunction(self.scorer):
                    return await self.scorer(*asked)
                scored = await asyncio.to_thread(self.scorer, *asked)
                return await scored if isinstance(scored, Awaitable) else scored
        except Exception as error:
            reason = f"scoring failed: {type(error).__name__}: {error}"
            return RewardBreakdown(total=None, judge=self.judge.name, unscored_reason=reason)

    def score_all(self, pairs: Sequence[tuple[Trajectory, Question]]) -> list[RewardBreakdown]:
        """`score` of finished trajectories, all at once, in order."""

        async def run() -> list[RewardBreakdown]:
            return await asyncio.gather(*(self.score(*pair) for pair in pairs))

        return asyncio.run(run()) if pairs else []


def _name(trajectory: Trajectory) -> str:
    return f"question {trajectory.question_id}, sample {trajectory.sample_index}"
