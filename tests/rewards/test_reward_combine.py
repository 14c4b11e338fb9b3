import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_helpers import fault, load_json, question, trajectory

from rewards import REWARDS, get_reward
from rewards.combine import Judgement, ascore, score, visor_reward
from rewards.judge import RuleJudge, Verdict
from rewards.retrieval import retrieval_outcome, retrieval_reward
from visor.types import StopReason


class Fixed:
    """A judge with given words; counts what it is asked."""

    name = "fixed"

    def __init__(self, correct=True, honest=True):
        self.words = {"correct": correct, "honest": honest}
        self.asked = []

    def verdict(self, question, gold_answers, answer):
        self.asked.append(("correct", question, gold_answers, answer))
        return Verdict(self.words["correct"], error="down")

    def honest(self, question, answer):
        self.asked.append(("honest", question, answer))
        return Verdict(self.words["honest"], error="down")

    async def averdict(self, *args):
        return self.verdict(*args)

    async def ahonest(self, *args):
        return self.honest(*args)


@pytest.mark.parametrize(
    ("delta", "reward"), [(None, -1.0), (0, -0.5), (1, 0.0), (2, -0.2), (3, -0.3), (9, -0.9)]
)
def test_retrieval_reward_is_eq_5(delta, reward):
    assert retrieval_reward(delta) == pytest.approx(reward, abs=1e-12)


@pytest.mark.parametrize(
    ("script", "gold", "searches", "complete_at"),
    [
        ("1", "1", 1, 1),
        ("12", "1", 2, 1),
        ("21", "1", 2, 2),
        ("2n1", "1", 3, 3),
        ("1n", "1", 2, 1),
        ("1x2c3", "13", 3, 3),
        ("3x1", "13", 2, 2),
        ("2", "1", 1, None),
        ("xx", "1", 0, None),
        ("12", "", 2, None),
        ("2c", "9", 1, None),
        ("1", "11", 1, 1),
    ],
)
def test_when_retrieval_is_complete(script, gold, searches, complete_at):
    outcome = retrieval_outcome(trajectory(script), question(gold).gold_page_ids)
    assert (outcome.searches, outcome.complete_at) == (searches, complete_at)


@pytest.mark.parametrize(
    ("script", "answer", "total"),
    [
        # complete: judge's word plus eq. 5
        ("1", "12", 1 - 0.5),
        ("12", "12", 1.0),
        ("123", "12", 1 - 0.2),
        ("12", "13", 0.0),
        ("1", "13", -0.5),
        # incomplete: an honest answer earns 0.2, a right guess nothing
        ("2", "12", -1.0),
        ("23", "not found", 0.2 - 1),
        # no answer, or an empty one
        ("1", None, -0.5),
        ("12", "", 0.0),
        ("2", "", -1.0),
        ("2", None, -1.0),
        # I_format: no search
        ("", "12", -1.0),
        ("", "not found", -1.0),
        ("xx", None, -1.0),
        ("x", "", -1.0),
    ],
)
def test_totals_by_hand(script, answer, total):
    breakdown = score(trajectory(script, answer), question("1"), RuleJudge())
    assert breakdown.total == pytest.approx(total, abs=1e-12)
    assert breakdown.format_penalty == (0 if set(script) & set("123") else 1)
    assert breakdown.judge == "rule"
    assert breakdown.unscored_reason == ""


def test_the_parts_are_kept():
    breakdown = score(trajectory("213", "not found"), question("1"), RuleJudge())
    assert (breakdown.searches, breakdown.complete_at, breakdown.delta) == (3, 2, 1)
    assert (breakdown.retrieval, breakdown.answer) == (0.0, 0.0)
    assert (breakdown.verdict, breakdown.honest) == (False, None)


@pytest.mark.parametrize("reason", [StopReason.LENGTH, StopReason.IMAGE_LIMIT, StopReason.MAX_TURNS])
def test_faults_of_the_policy_are_scored(reason):
    assert score(trajectory("12", stop_reason=reason), question("1"), RuleJudge()).total == 0.0


@pytest.mark.parametrize("source", ["environment", "policy"])
def test_a_trajectory_that_a_fault_ended_is_unscored(source):
    judge = Fixed()
    breakdown = score(trajectory("12", **fault(source)), question("1"), judge)
    assert breakdown.total is None
    assert "ConnectionError: gone" in breakdown.unscored_reason
    assert (breakdown.searches, breakdown.delta) == (2, 1)
    assert judge.asked == []


@pytest.mark.parametrize(
    ("script", "words"), [("1", (None, True)), ("2", (None, True)), ("2", (False, None))]
)
def test_a_judge_without_a_verdict_leaves_the_trajectory_unscored(script, words):
    breakdown = score(trajectory(script, "12"), question("1"), Fixed(*words))
    assert breakdown.total is None
    assert breakdown.unscored_reason == "judge fault: down"


def test_a_question_without_gold_pages_has_a_verdict_but_no_reward():
    judge = Fixed()
    breakdown = score(trajectory("12", "12"), question(""), judge)
    assert (breakdown.total, breakdown.delta, breakdown.verdict) == (None, None, True)
    assert "no gold pages" in breakdown.unscored_reason
    assert [asked[0] for asked in judge.asked] == ["correct"]


@pytest.mark.parametrize(
    ("script", "answer", "asked"),
    [
        ("1", "12", ["correct"]),
        ("2", "12", ["correct", "honest"]),
        ("1", "  ", []),
        ("1", None, []),
        ("2", "", []),
    ],
)
def test_what_the_judge_is_asked(script, answer, asked):
    judge = Fixed()
    breakdown = score(trajectory(script, answer), question("1"), judge)
    assert [entry[0] for entry in judge.asked] == asked
    if not asked:
        assert breakdown.verdict is (None if answer is None else False)


def test_a_trajectory_of_another_question_is_refused():
    with pytest.raises(ValueError, match="'q2'"):
        score(trajectory("1", "12", question_id="q2"), question("1"), RuleJudge())


def test_the_asynchronous_score_is_the_same_and_the_synchronous_one_works_in_a_loop():
    async def both(record):
        return await ascore(record, question("1"), RuleJudge()), score(record, question("1"), RuleJudge())

    for script, answer in [("1", "12"), ("2", "not found"), ("", None), ("12", "")]:
        waited, direct = asyncio.run(both(trajectory(script, answer)))
        assert waited == direct


def test_case_hint_leak_scores_no_answer():
    right = load_json("hint_leak.json")["right"]
    breakdown = score(trajectory("xx"), question("1", ["Beijing"]), RuleJudge())
    assert breakdown.answer == right["reward_answer_part"]
    assert (breakdown.total, breakdown.verdict) == (-1.0, None)


def test_the_registry_names_the_reward():
    assert get_reward("visor") is REWARDS["visor"] is ascore
    with pytest.raises(ValueError, match=r"unknown reward 'visr'; known: visor, vrag"):
        get_reward("visr")


def slow_total(script: str, gold: set[str], answer, correct: bool, honest: bool) -> float:
    """Eqs. 3–5 read off the page, one sentence at a time."""
    searches = [step for step in script if step.isdigit() or step == "n"]
    if not searches:
        return -1.0
    finished = [t for t in range(1, len(searches) + 1) if gold <= set(searches[:t])]
    said_something = answer is not None and answer.strip() != ""
    if finished:
        extra = len(searches) - min(finished)
        r_ret = {0: -0.5, 1: 0.0}.get(extra, -0.1 * extra)
        return r_ret + (1.0 if said_something and correct else 0.0)
    return -1.0 + (0.2 if said_something and honest else 0.0)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    st.text(alphabet="12345ncx", max_size=9),
    st.sets(st.sampled_from("123"), min_size=1),
    st.sampled_from([None, "", " ", "12"]),
    st.booleans(),
    st.booleans(),
)
def test_totals_equal_the_slow_version(script, gold, answer, correct, honest):
    judge = Fixed(correct, honest)
    breakdown = score(trajectory(script, answer), question("".join(sorted(gold))), judge)
    assert breakdown.total == pytest.approx(slow_total(script, gold, answer, correct, honest), abs=1e-12)


def test_a_missing_verdict_without_a_message_is_still_a_fault():
    judgement = Judgement("j", correct=Verdict(None))
    assert visor_reward(trajectory("1", "12"), question("1"), judgement).unscored_reason == (
        "judge fault: no verdict"
    )
