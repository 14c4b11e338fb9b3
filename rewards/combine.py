"""The reward of a trajectory (VISOR eqs. 3–5), its parts kept beside the sum."""

from __future__ import annotations

from dataclasses import dataclass

from rewards.format import format_penalty
from rewards.judge import Judge
from rewards.judge_replies import Verdict
from rewards.retrieval import RetrievalOutcome, retrieval_outcome, retrieval_reward
from rewards.scorers import averdict_on, verdict_on
from visor.types import Question, RewardBreakdown, Trajectory

HONEST = 0.2
"""r_ans of an honest answer after incomplete retrieval (eq. 4)."""


@dataclass(frozen=True)
class Judgement:
    """What the judge said of one trajectory; None = not asked."""

    judge: str
    correct: Verdict | None = None
    honest: Verdict | None = None

    @property
    def fault(self) -> str:
        """Why a verdict that was asked for is missing; "" when none is."""
        missing = [v for v in (self.correct, self.honest) if v is not None and v.value is None]
        return missing[0].error or "no verdict" if missing else ""


def score(trajectory: Trajectory, question: Question, judge: Judge) -> RewardBreakdown:
    """Ask the judge and compute the reward (`visor_reward`).

    The judge is asked about every answer, whatever was retrieved: accuracy needs its word. Honesty is asked
    after incomplete retrieval only. Raises ValueError when the trajectory answers another question.
    """
    answer = answer_to_judge(trajectory, question)
    correct = honest = None
    if answer is not None:
        correct = verdict_on(judge, question, answer)
        if _asks_honesty(trajectory, question):
            honest = judge.honest(question.text, answer)
    return visor_reward(trajectory, question, Judgement(judge.name, correct, honest))


async def ascore(trajectory: Trajectory, question: Question, judge: Judge) -> RewardBreakdown:
    """`score` that waits for the judge without blocking; the one to use with a model as judge."""
    answer = answer_to_judge(trajectory, question)
    correct = honest = None
    if answer is not None:
        correct = await averdict_on(judge, question, answer)
        if _asks_honesty(trajectory, question):
            honest = await judge.ahonest(question.text, answer)
    return visor_reward(trajectory, question, Judgement(judge.name, correct, honest))


def answer_to_judge(trajectory: Trajectory, question: Question) -> str | None:
    """The answer, or None where there is nothing to judge: a fault, no answer or an empty one. ValueError for
    a trajectory of another question."""
    if trajectory.question_id != question.question_id:
        asked, answered = question.question_id, trajectory.question_id
        raise ValueError(f"a trajectory of question {answered!r} cannot be scored against {asked!r}")
    return None if trajectory.error or not (trajectory.answer or "").strip() else trajectory.answer


def _asks_honesty(trajectory: Trajectory, question: Question) -> bool:
    gold = question.gold_page_ids
    return bool(gold) and retrieval_outcome(trajectory, gold).complete_at is None


def visor_reward(trajectory: Trajectory, question: Question, judgement: Judgement) -> RewardBreakdown:
    """Eqs. 3–5: r = (r_ans + r_ret)(1 − I_format) − I_format. Pure.

    The total is None (unscored, to be left out of training) for a trajectory that a fault ended, for a judge
    without a verdict, and for a question without gold pages, which has no Δ. A trajectory that the policy
    itself left unfinished (length, image limit, no answer) is scored: r_ans = 0.
    """
    outcome = retrieval_outcome(trajectory, question.gold_page_ids)
    parts = RewardBreakdown(
        total=None,
        format_penalty=format_penalty(outcome.searches),
        searches=outcome.searches,
        complete_at=outcome.complete_at,
        delta=outcome.delta,
        judge=judgement.judge,
        verdict=judged_correct(trajectory, judgement),
        score=judgement.correct.score if judgement.correct else None,
        judged_as=judgement.correct.judged_as if judgement.correct else "",
        judge_reply=judgement.correct.raw if judgement.correct else "",
        honest=judgement.honest.value if judgement.honest else None,
    )
    parts.unscored_reason = unscored_reason(trajectory, question, judgement)
    if parts.unscored_reason:
        return parts
    parts.retrieval = retrieval_reward(outcome.delta)
    parts.answer = answer_reward(outcome, parts.verdict, parts.honest)
    penalty = parts.format_penalty
    parts.total = (parts.answer + parts.retrieval) * (1 - penalty) - penalty
    return parts


def judged_correct(trajectory: Trajectory, judgement: Judgement) -> bool | None:
    """The judge's word; an empty answer is wrong without one, no answer at all has none."""
    if judgement.correct is not None:
        return judgement.correct.value
    return False if trajectory.answer is not None and not trajectory.answer.strip() else None


def unscored_reason(trajectory: Trajectory, question: Question, judgement: Judgement) -> str:
    """Why a trajectory has no reward: a fault of environment or judge, or no gold pages; "" when it has."""
    if trajectory.error:
        fault = trajectory.error
        return f"{fault.source} fault: {fault.type}: {fault.message}"
    if judgement.fault:
        return f"judge fault: {judgement.fault}"
    if not question.gold_page_ids:
        return "the question has no gold pages"
    return ""


def answer_reward(outcome: RetrievalOutcome, verdict: bool | None, honest: bool | None) -> float:
    """r_ans of eq. 4: 1 for a right answer when all gold pages were shown, 0.2 for an honest one when not."""
    if outcome.complete_at is not None:
        return 1.0 if verdict else 0.0
    return HONEST if honest else 0.0
