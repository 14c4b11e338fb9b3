import asyncio

import pytest

from rewards.judge import RuleJudge
from rollout.engine import EpisodeJob, RolloutEngine
from rollout.group import sample_groups
from visor.types import Question, RewardBreakdown, StopReason, Trajectory, derive_seed


def question(question_id, gold="red"):
    return Question(question_id=question_id, text="?", gold_answers=[gold], gold_page_ids=["d#page=1"])


class System:
    """Answers "red" after a number of steps that depends on the question; counts what runs at once."""

    name = "fake"

    def __init__(self, steps=None):
        self.steps = steps or {}
        self.running = self.most = 0
        self.order = []

    async def solve(self, question, *, seed=0, sample_index=0):
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(self.steps.get(question.question_id, 1)):
            await asyncio.sleep(0)
        self.running -= 1
        self.order.append(question.question_id)
        return Trajectory(
            question_id=question.question_id,
            question=question.text,
            seed=seed,
            sample_index=sample_index,
            answer="red",
            stop_reason=StopReason.ANSWER,
        )


def test_trajectories_come_scored_and_in_job_order_though_they_end_in_another():
    system = System({"slow": 50, "fast": 1})
    seen = []
    jobs = [EpisodeJob(question("slow")), EpisodeJob(question("fast", gold="blue"))]
    done = RolloutEngine(system, RuleJudge()).run(jobs, lambda job, t: seen.append(job.question.question_id))
    assert system.order == seen == ["fast", "slow"]
    assert [t.question_id for t in done] == ["slow", "fast"]
    assert [t.reward.verdict for t in done] == [True, False]


def test_run_each_hands_out_every_trajectory_once():
    seen = []
    jobs = [EpisodeJob(question(name)) for name in "abc"]
    RolloutEngine(System({"a": 9}), RuleJudge()).run_each(
        jobs, lambda job, t: seen.append((job.question.question_id, t.question_id, t.reward.verdict))
    )
    assert seen == [("b", "b", True), ("c", "c", True), ("a", "a", True)]


def test_max_concurrency_bounds_what_runs_at_once():
    system = System()
    jobs = [EpisodeJob(question(str(i)), sample_index=i) for i in range(9)]
    RolloutEngine(system, RuleJudge(), max_concurrency=3).run(jobs)
    assert system.most == 3
    with pytest.raises(ValueError, match="max_concurrency"):
        RolloutEngine(system, RuleJudge(), max_concurrency=0)


def test_a_scorer_that_raises_leaves_its_trajectory_unscored_and_the_rest_alone():
    def scorer(trajectory, asked, judge):
        if asked.question_id == "b":
            raise KeyError("gold")
        return RewardBreakdown(total=1.0)

    jobs = [EpisodeJob(question(name)) for name in "abc"]
    done = RolloutEngine(System(), RuleJudge(), scorer).run(jobs)
    assert [t.reward.total for t in done] == [1.0, None, 1.0]
    assert "KeyError" in done[1].reward.unscored_reason


def test_a_plain_scorer_with_an_event_loop_of_its_own_works():
    from rewards.combine import score

    done = RolloutEngine(System(), RuleJudge(), score).run([EpisodeJob(question("a"))])
    assert done[0].reward.verdict is True


def test_an_exception_of_on_done_ends_the_run_as_it_is():
    def full(job, trajectory):
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        RolloutEngine(System({"a": 3}), RuleJudge()).run(
            [EpisodeJob(question("a")), EpisodeJob(question("b"))], full
        )


def test_groups_by_question_with_seeds_that_follow_from_run_and_step():
    engine = RolloutEngine(System({"a": 9}), RuleJudge())
    groups = sample_groups(engine, [question("a"), question("b")], 3, run_seed=5, step=2)
    assert [group.question.question_id for group in groups] == ["a", "b"]
    for group in groups:
        assert {t.question_id for t in group.trajectories} == {group.question.question_id}
        assert [t.sample_index for t in group.trajectories] == [0, 1, 2]
        assert {t.seed for t in group.trajectories} == {derive_seed(5, 2)}
        assert group.rewards == [t.reward.total for t in group.trajectories]
    with pytest.raises(ValueError, match="group_size"):
        sample_groups(engine, [question("a")], 0, 5, 2)


def test_a_question_twice_in_a_step_is_sampled_anew():
    engine = RolloutEngine(System(), RuleJudge())
    first, second = sample_groups(engine, [question("a"), question("a")], 2, run_seed=1, step=1)
    assert [t.sample_index for t in first.trajectories] == [0, 1]
    assert [t.sample_index for t in second.trajectories] == [2, 3]


class PatientJudge(RuleJudge):
    """Judges the answer to question "first" only after every other answer has been judged."""

    def __init__(self, others):
        self.left, self.others_done = others, asyncio.Event()
        self.order = []

    async def averdict(self, question, gold_answers, answer):
        if gold_answers == ["first"]:
            await self.others_done.wait()
        self.order.append(gold_answers[0])
        self.left -= gold_answers != ["first"]
        if not self.left:
            self.others_done.set()
        return await super().averdict(question, gold_answers, answer)


def test_a_judge_call_holds_up_neither_episodes_nor_other_scores():
    """One episode at a time: with the score inside the episode's slot this would never end."""
    system = System()
    jobs = [EpisodeJob(question(name, gold=name)) for name in ("first", "a", "b")]

    async def run():
        judge = PatientJudge(others=2)
        async with asyncio.timeout(10):
            return await RolloutEngine(system, judge, max_concurrency=1).arun(jobs), judge

    done, judge = asyncio.run(run())
    assert system.most == 1
    assert judge.order == ["a", "b", "first"]
    assert [t.question_id for t in done] == ["first", "a", "b"]


def test_scores_that_wait_are_bounded():
    """While the judge is silent, episodes stop after the backlog instead of filling the memory."""
    from rollout.engine import SCORING_BACKLOG

    class Stuck(RuleJudge):
        async def averdict(self, *asked):
            await gate.wait()
            return await super().averdict(*asked)

    async def run():
        nonlocal gate
        gate = asyncio.Event()
        jobs = [EpisodeJob(question(str(n))) for n in range(30)]
        task = asyncio.create_task(RolloutEngine(system, Stuck(), max_concurrency=2).arun(jobs))
        for _ in range(500):
            await asyncio.sleep(0)
        solved = len(system.order)
        gate.set()
        return solved, await task

    gate, system = asyncio.Event(), System()
    solved, done = asyncio.run(run())
    assert solved == 2 * (1 + SCORING_BACKLOG)
    assert len(done) == 30
