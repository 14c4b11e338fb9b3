"""VRAG-RL's reward, by hand: 0.7 judge + 0.1 format + 0.2 NDCG."""

import asyncio
import json
import math

import pytest
from reward_helpers import case_file, fault, question, trajectory, turn

from rewards import REWARDS, get_reward
from rewards.judge import RuleJudge, Verdict
from rewards.vrag import shown_ndcg, vrag_ascore
from visor.types import Search, StopReason


def scored(script, answer=None, gold="1", judge=None, **fields):
    judge = judge or RuleJudge()
    return asyncio.run(vrag_ascore(trajectory(script, answer, **fields), question(gold), judge))


SECOND = 1 / math.log2(3)  # the gain of rank 2, 0.6309


@pytest.mark.parametrize(
    ("script", "answer", "gold", "total"),
    [
        ("1", "12", "1", 0.7 + 0.1 + 0.2),
        ("21", "12", "1", 0.7 + 0.1 + 0.2 * SECOND),
        ("1", "13", "1", 0.1 + 0.2),  # wrong: form and retrieval still count
        ("2", "12", "1", 0.7 + 0.1),  # right without the page
        ("2", "not found", "1", 0.1),  # VRAG-RL pays nothing for honesty
        ("1x", "12", "1", 0.7 + 0.2),  # an invalid action
        ("1", None, "1", 0.2),  # no answer
        ("1", " ", "1", 0.2),
        ("", "12", "1", 0.7 + 0.1),  # no search
        ("", None, "1", 0.0),
        ("1n2c", "12", "12", 0.7 + 0.1 + 0.2),
        ("12", "12", "23", 0.7 + 0.1 + 0.2 * SECOND / (1 + SECOND)),
    ],
)
def test_totals_by_hand(script, answer, gold, total):
    breakdown = scored(script, answer, gold)
    assert breakdown.total == pytest.approx(total, abs=1e-12)
    assert 0 <= breakdown.total <= 1
    assert set(breakdown.parts) == {"judge", "format", "ndcg"}
    assert (breakdown.retrieval, breakdown.answer) == (None, None)


def test_two_actions_in_a_reply_cost_the_format():
    record = trajectory("1", "12")
    record.turns[0].format_ok = False
    breakdown = asyncio.run(vrag_ascore(record, question("1"), RuleJudge()))
    assert breakdown.parts == {"judge": 1.0, "format": 0.0, "ndcg": 1.0}
    assert breakdown.total == pytest.approx(0.9)


def test_the_figures_of_retrieval_are_kept_beside_it():
    breakdown = scored("213", "12")
    assert (breakdown.searches, breakdown.complete_at, breakdown.delta) == (3, 2, 1)
    assert breakdown.verdict is True


class Down(RuleJudge):
    async def averdict(self, *args):
        return Verdict(None, error="down")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"script": "1", "answer": "12", "judge": Down()}, "judge fault: down"),
        ({"script": "1", **fault()}, "environment fault"),
        ({"script": "1", "answer": "12", "gold": ""}, "no gold pages"),
    ],
)
def test_unscored_as_visors(fields, reason):
    breakdown = scored(**fields)
    assert breakdown.total is None
    assert reason in breakdown.unscored_reason
    assert breakdown.parts == {}


def test_a_fault_of_the_policy_is_scored():
    assert scored("1", stop_reason=StopReason.LENGTH).total == pytest.approx(0.2)


def test_a_trajectory_of_another_question_is_refused():
    with pytest.raises(ValueError, match="'q2'"):
        scored("1", "12", question_id="q2")


def test_case_f4():
    for case in json.loads(case_file("ndcg_cases.json").read_text(encoding="utf-8")):
        found = shown_ndcg(case["retrieved"], case["gold"])
        if isinstance(case["right"], float):
            assert found == pytest.approx(case["right"], abs=5e-5)
        else:
            assert found is None


def test_a_page_shown_again_does_not_count_twice():
    record = trajectory("1", "12")
    again = turn(1, Search(query="q"), record.turns[0].observation.kind, "1")
    record.turns.insert(1, again)
    breakdown = asyncio.run(vrag_ascore(record, question("12"), RuleJudge()))
    assert breakdown.parts["ndcg"] == pytest.approx(1 / (1 + SECOND))


def test_the_registry_names_it():
    assert get_reward("vrag") is REWARDS["vrag"] is vrag_ascore
