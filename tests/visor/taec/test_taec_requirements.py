"""Slots of a question and the weights they carry."""

from __future__ import annotations

import asyncio

import pytest

from visor.taec.requirements import ModelSlotExtractor, RequirementState, parse_slots, rule_slots
from visor.types import Completion


class FakeClient:
    name = "fake"

    def __init__(self, reply: str):
        self.reply = reply
        self.requests = []

    async def complete(self, request):
        self.requests.append(request)
        await asyncio.sleep(0)
        return Completion(text=self.reply)


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is the revenue of Acme Corp in 2023?", ("revenue", "Acme", "Corp", "2023")),
        ("how tall is the blue tower ?", ("tall", "blue", "tower")),
        ("Who is it?", ()),
        ("", ()),
        ("Acme's growth, growth and GROWTH", ("Acme", "growth")),
        ("2023年公司的总收入是多少？", ("2023年", "公司", "总收入")),
        ("请问图表中哪个国家的人口最多", ("图表", "国家", "人口")),
    ],
)
def test_rules_take_content_words(question, expected):
    slots = rule_slots(question)
    assert slots.keywords == expected
    assert (slots.extractor, slots.model_calls) == ("rules", 0)


def test_rules_cut_to_four_preferring_names_and_numbers_then_length():
    slots = rule_slots("cat share of regional electricity consumption reported by Zed for 1999")
    assert slots.keywords == ("electricity", "consumption", "Zed", "1999")


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ('["revenue", "Acme Corp", "2023"]', ["revenue", "Acme Corp", "2023"]),
        ('Here: ["a b", "A  B", 2023]', ["a b", "2023"]),
        ("1. revenue\n2) Acme Corp\n- 2023\n", ["revenue", "Acme Corp", "2023"]),
        ("收入、年份", ["收入", "年份"]),
        ("a, b, c, d, e", ["a", "b", "c", "d"]),
        ("3.5 percent", ["3.5 percent"]),
        ("x" * 61, []),
        ("", []),
        ("[]", []),
    ],
)
def test_parse_slots(reply, expected):
    assert parse_slots(reply) == expected


def test_model_is_called_once_a_question_even_by_concurrent_episodes():
    client = FakeClient('["revenue", "Acme", "year", "unit", "currency"]')
    extractor = ModelSlotExtractor(client)

    async def ask():
        return await asyncio.gather(*(extractor.extract(q) for q in ["q1", "q1", "q2", "q1"]))

    answers = asyncio.run(ask())
    again = asyncio.run(extractor.extract("q1"))
    assert len(client.requests) == 2
    assert {request.sampling.temperature for request in client.requests} == {0.0}
    assert [slots.model_calls for slots in [*answers, again]] == [1, 0, 1, 0, 0]
    assert again.keywords == ("revenue", "Acme", "year", "unit")
    assert again.extractor == "model"


def test_model_without_a_keyword_falls_back_and_says_so():
    slots = asyncio.run(ModelSlotExtractor(FakeClient(" ")).extract("blue tower"))
    assert slots.keywords == ("blue", "tower")
    assert slots.extractor == "rules (the model named no slot)"
    assert slots.model_calls == 1


def test_open_weights_drop_what_evidence_supports():
    state = RequirementState.uniform(["revenue", "2023", "总收入", "unit"])
    assert state.open_weights() == {"revenue": 0.25, "2023": 0.25, "总收入": 0.25, "unit": 0.25}
    state.add_support(["REVENUE is unknown", "公司总收入"])
    assert state.open_weights() == {"revenue": 0.0, "2023": 0.25, "总收入": 0.0, "unit": 0.25}
    state.support["unit"] = 0.6
    assert state.open_weights()["unit"] == pytest.approx(0.1)
    assert RequirementState.uniform([]).open_weights() == {}
