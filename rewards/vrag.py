"""VRAG-RL's reward as a preset (arXiv:2505.22019): 0.7 judge + 0.1 format + 0.2 NDCG."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rewards.combine import Judgement, answer_to_judge, judged_correct, unscored_reason
from rewards.format import is_well_formed
from rewards.judge import Judge
from rewards.retrieval import retrieval_outcome
from rewards.scorers import averdict_on
from visor.retrieval.quality import ndcg
from visor.types import Question, RewardBreakdown, Trajectory

WEIGHTS = {"judge": 0.7, "format": 0.1, "ndcg": 0.2}


async def vrag_ascore(trajectory: Trajectory, question: Question, judge: Judge) -> RewardBreakdown:
    """Ask the judge about the answer, if there is one, and compute the reward (`vrag_reward`)."""
    answer = answer_to_judge(trajectory, question)
    correct = None
    if answer is not None:
        correct = await averdict_on(judge, question, answer)
    return vrag_reward(trajectory, question, Judgement(judge.name, correct))


def vrag_reward(trajectory: Trajectory, question: Question, judgement: Judgement) -> RewardBreakdown:
    """The weighted sum of three parts, each 0 to 1. Pure.

    judge: the answer is right; format: `is_well_formed`; ndcg: of the pages in the order they were shown.
    Which pages were shown counts whatever the answer is. Unscored in the same cases as VISOR's reward: a
    fault, a judge without a verdict, a question without gold pages (which has no NDCG).
    """
    outcome = retrieval_outcome(trajectory, question.gold_page_ids)
    breakdown = RewardBreakdown(
        total=None,
        searches=outcome.searches,
        complete_at=outcome.complete_at,
        delta=outcome.delta,
        judge=judgement.judge,
        verdict=judged_correct(trajectory, judgement),
        score=judgement.correct.score if judgement.correct else None,
        judged_as=judgement.correct.judged_as if judgement.correct else "",
        judge_reply=judgement.correct.raw if judgement.correct else "",
        unscored_reason=unscored_reason(trajectory, question, judgement),
    )
    gain = shown_ndcg(trajectory.shown_page_ids, question.gold_page_ids)
    if breakdown.unscored_reason or gain is None:
        return breakdown
    breakdown.parts = {
        "judge": float(bool(breakdown.verdict)),
        "format": float(is_well_formed(trajectory)),
        "ndcg": gain,
    }
    breakdown.total = sum(WEIGHTS[name] * value for name, value in breakdown.parts.items())
    return breakdown


def shown_ndcg(page_ids: Sequence[str], gold_page_ids: Collection[str]) -> float | None:
    """NDCG of all pages in the order they were shown, against all gold pages; None without gold pages."""
    return ndcg(page_ids, gold_page_ids, k=max(1, len(page_ids), len(gold_page_ids)))
