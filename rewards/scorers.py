"""The official rule-based scorers of benchmarks as judges: offline, no model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from rewards.honesty import is_refusal
from rewards.judge import Judge
from rewards.judge_replies import Verdict
from rewards.mmlongbench import NOT_ANSWERABLE, mmlongbench_score
from rewards.slidevqa import answer_match
from visor.types import Question


class BenchmarkScorer(ABC):
    """A judge by the rules of a benchmark, which may need more of a question than its texts."""

    name: str

    @abstractmethod
    def verdict_on(self, question: Question, answer: str) -> Verdict:
        """Is the answer right, and what is its score?"""

    async def averdict_on(self, question: Question, answer: str) -> Verdict:
        """`verdict_on` that waits without blocking, where there is something to wait for."""
        return self.verdict_on(question, answer)

    def verdict(self, question: str, gold_answers: Sequence[str], answer: str) -> Verdict:
        """Judge by texts alone: the answer format is unknown, hence free text."""
        return self.verdict_on(_of_texts(question, gold_answers), answer)

    def honest(self, question: str, answer: str) -> Verdict:
        """By the list of refusal phrases."""
        return Verdict(is_refusal(answer))

    async def averdict(self, question: str, gold_answers: Sequence[str], answer: str) -> Verdict:
        return await self.averdict_on(_of_texts(question, gold_answers), answer)

    async def ahonest(self, question: str, answer: str) -> Verdict:
        return self.honest(question, answer)


def _of_texts(question: str, gold_answers: Sequence[str]) -> Question:
    return Question(question_id="", text=question, gold_answers=list(gold_answers))


class MMLongBenchJudge(BenchmarkScorer):
    """MMLongBench-Doc's scorer; `Verdict.score` is its score, and what scores more than 0 is right.

    The public pipeline has a model rewrite each answer first (`rewards.extraction`); alone, an answer that
    admits that the information is missing stands for "Not answerable", and any other is scored as it is.
    """

    name = "mmlongbench"

    def verdict_on(self, question: Question, answer: str) -> Verdict:
        if not answer.strip():
            return Verdict(False, score=0.0)
        readings = [answer, NOT_ANSWERABLE] if is_refusal(answer) else [answer]
        score = max(
            (
                mmlongbench_score(gold, reading, question.answer_format)
                for gold in question.gold_answers
                for reading in readings
            ),
            default=0.0,
        )
        return Verdict(score > 0, score=score)


class SlideVQAJudge(BenchmarkScorer):
    """SlideVQA's scorer: right = exact match, `Verdict.score` = token F1, both of normalised answers."""

    name = "slidevqa"

    def verdict_on(self, question: Question, answer: str) -> Verdict:
        matches = [answer_match(question.text, gold, answer) for gold in question.gold_answers]
        return Verdict(any(m.exact for m in matches), score=max((m.f1 for m in matches), default=0.0))


SCORERS: dict[str, type[BenchmarkScorer]] = {
    scorer.name: scorer for scorer in (MMLongBenchJudge, SlideVQAJudge)
}
"""By the name that a configuration gives them."""


def verdict_on(judge: Judge, question: Question, answer: str) -> Verdict:
    """Ask any judge about the answer to a question."""
    if isinstance(judge, BenchmarkScorer):
        return judge.verdict_on(question, answer)
    return judge.verdict(question.text, question.gold_answers, answer)


async def averdict_on(judge: Judge, question: Question, answer: str) -> Verdict:
    """`verdict_on` that waits for the judge without blocking."""
    if isinstance(judge, BenchmarkScorer):
        return await judge.averdict_on(question, answer)
    return await judge.averdict(question.text, question.gold_answers, answer)
