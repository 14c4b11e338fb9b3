"""Answers made short by a model before a benchmark's rules score them."""

import asyncio
import json

import pytest
from reward_helpers import question as question_of
from reward_helpers import trajectory

from rewards.combine import ascore
from rewards.extraction import ExtractingScorer, parse_short
from rewards.judge_cache import JudgeCache
from rewards.scorers import MMLongBenchJudge, SlideVQAJudge
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


def test_a_short_answer_is_asked_for_once_and_scored_by_any_rules(tmp_path):
    """Failures are not kept; another answer, wording or model is asked; the gold answer plays no part."""
    cache = JudgeCache(tmp_path / "judge.jsonl")
    client = Shortener("what?", "<short>['a', 'b c']</short>")
    first = ExtractingScorer(MMLongBenchJudge(), client, cache=cache, attempts=1)
    assert first.verdict_on(LIST, "a and b c").value is None
    verdict = first.verdict_on(LIST, "a and b c")
    assert (verdict.value, verdict.raw, len(client.requests)) == (True, "<short>['a', 'b c']</short>", 2)

    fresh = JudgeCache(tmp_path / "judge.jsonl")
    again = ExtractingScorer(MMLongBenchJudge(), client, cache=fresh)
    assert again.verdict_on(LIST, "a and b c") == verdict
    other_gold = LIST.model_copy(update={"gold_answers": ["['z']"]})
    assert again.verdict_on(other_gold, "a and b c").value is False
    assert ExtractingScorer(SlideVQAJudge(), client, cache=fresh).verdict_on(LIST, "a and b c").judged_as
    assert len(client.requests) == 2
    again.verdict_on(LIST, "b c and a")
    ExtractingScorer(MMLongBenchJudge(), client, cache=fresh, identity="other").verdict_on(LIST, "a and b c")
    assert len(client.requests) == 4
    assert fresh.damaged == 0


def test_the_same_answer_at_the_same_time_is_one_call():
    client = Shortener("<short>['a', 'b c']</short>")
    judge = ExtractingScorer(MMLongBenchJudge(), client)

    async def ask():
        return await asyncio.gather(*(judge.averdict_on(LIST, "a and b c") for _ in range(5)))

    assert all(verdict.value for verdict in asyncio.run(ask()))
    assert len(client.requests) == 1


def test_the_option_keeps_short_answers_in_the_judge_cache(tmp_path):
    """`judge_options.cache` with the extractor, through a real file of its own and a scripted model."""
    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps({"reply": "<short>['a', 'b c']</short>"}) + "\n")
    options = JudgeOptions(extractor=f"script:{script}", cache=str(tmp_path / "judge.jsonl"))
    assert make_judge("mmlongbench", options=options).verdict_on(LIST, "a, b c").value is True
    [line] = (tmp_path / "judge.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert (record["answer"], record["value"]) == ("a, b c", None)
    assert record["judge"].startswith("script:")


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
