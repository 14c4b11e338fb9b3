"""Answers made short by a model before a benchmark's rules score them."""

import asyncio

import pytest
from reward_helpers import question as question_of
from reward_helpers import trajectory

from rewards.combine import ascore
from rewards.extraction import ExtractingScorer, parse_short
from rewards.scorers import MMLongBenchJudge
from rollout.benchmark_figures import benchmark_figures
from rollout.build import JudgeOptions, make_judge
from rollout.results import result_row
from visor.types import Completion, Question

LIST = Question(question_id="q1", text="Which {answer}?", gold_answers=["['a', 'b c']"], answer_format="List")


class Shortener:
    name = "short"

    def __init__(self, *replies):
        self.replies, self.requests = list(replies), []

    async def complete(self, request):
        self.requests.append(request)
        reply = self.replies[min(len(self.requests), len(self.replies)) - 1]
        if isinstance(reply, Exception):
            raise reply
        return Completion(text=reply)


@pytest.mark.parametrize(
    ("reply", "short"),
    [
        ("<short>12</short>", "12"),
        ("it says\n<SHORT> ['a',\n 'b'] </SHORT>", "['a',\n 'b']"),
        ("<short>1</short> no: <short>2</short>", "2"),
        ("<short> </short>", None),
        ("12", None),
        ("<short>12", None),
        (None, None),
    ],
)
def test_the_short_answer_is_read_from_the_last_tag(reply, short):
    assert parse_short(reply) == short


def test_the_short_answer_is_scored_and_the_gold_answer_is_not_shown():
    client = Shortener("<short>['b c', 'a']</short>")
    judge = ExtractingScorer(MMLongBenchJudge(), client)
    answer = "They are a and also b {question} c."
    verdict = judge.verdict_on(LIST, answer)
    assert (verdict.value, verdict.score, verdict.judged_as) == (True, 1.0, "['b c', 'a']")
    sent = "\n".join(message.text for message in client.requests[0].messages)
    assert LIST.text in sent
    assert answer in sent
    assert LIST.gold_answers[0] not in sent
    assert MMLongBenchJudge().verdict_on(LIST, answer).value is False
    assert judge.verdict_on(LIST, "  ").value is False
    assert len(client.requests) == 1


def test_no_short_answer_and_a_fault_are_no_verdict():
    client = Shortener("what?", "", "<short>['a', 'b c']</short>")
    assert ExtractingScorer(MMLongBenchJudge(), client).verdict_on(LIST, "x").value is True
    verdict = ExtractingScorer(MMLongBenchJudge(), Shortener("what?"), attempts=2).verdict_on(LIST, "x")
    assert (verdict.value, verdict.error) == (None, "no short answer in 2 replies of short")
    verdict = ExtractingScorer(MMLongBenchJudge(), Shortener(ConnectionError("gone"))).verdict_on(LIST, "x")
    assert (verdict.value, verdict.error) == (None, "ConnectionError: gone")


def test_what_was_scored_stands_in_the_row_and_counts_for_f1():
    judge = ExtractingScorer(MMLongBenchJudge(), Shortener("<short>Not answerable</short>"))
    question = question_of().model_copy(update={"answer_format": "Int"})
    record = trajectory("1", answer="These pages are about ships.")
    record.reward = asyncio.run(ascore(record, question, judge))
    row = result_row(record, question)
    assert (row.judge, row.judged_as, row.verdict, row.score) == (judge.name, "Not answerable", False, 0.0)
    figures = benchmark_figures([row])["mmlongbench+extraction:short"]
    assert (figures["accuracy"], figures["recall"], figures["precision"]) == (0.0, 0.0, None)


def test_the_option_and_the_judges_it_is_for():
    pytest.importorskip("openai")
    options = JudgeOptions(extractor="openai:m@http://127.0.0.1:9/v1")
    assert make_judge("mmlongbench", options=options).name == "mmlongbench+extraction:m"
    with pytest.raises(ValueError, match="is for mmlongbench and slidevqa, not for the judge rule"):
        make_judge("rule", options=options)
