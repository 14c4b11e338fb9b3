"""The scorers of MMLongBench-Doc and SlideVQA. The values of the tables are what the public scorers give."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_helpers import case_file

from rewards.answer import matches_any
from rewards.mmlongbench import anls, edit_distance, mmlongbench_score, read_list
from rewards.scorers import MMLongBenchJudge, SlideVQAJudge
from rewards.slidevqa import answer_match, evidence_match, normalise
from visor.types import Question

PWNED = Path("/tmp/PWNED_BY_EVAL")
LIST = "['White', '10%', 'Blue']"


@pytest.mark.parametrize(
    ("answer_format", "gold", "answer", "score"),
    [
        ("Int", "3", "3.9", 1),  # cut to a whole number
        ("Int", "3", " 3 ", 1),
        ("Int", "3", "three", 0),
        ("Int", "3", "3 ships", 0),
        ("Int", "21%", "21%", 0),
        ("Int", "3", "inf", 0),
        ("Int", "3", "9" * 5000, 0),
        ("Float", "29%", "0.29", 1),
        ("Float", "29%", "2900", 1),
        ("Float", "29%", "29.2", 1),
        ("Float", "29%", "29.3", 0),
        ("Float", "-3.65%", "3.65%", 0),
        ("Float", "$1577.00", "$1577", 1),
        ("Float", "$1577.00", "1,577", 0),
        ("Float", "0.105", "0.1", 1),  # equal when rounded to two decimals
        ("Float", "3.5", "nan", 0),
        ("Float", "3.5", "inf", 0),
        ("Str", "1.5", "15", 2 / 3),
        ("Str", "A", "A", 1),
        ("Str", "abcd", "abxd", 0.75),
        ("Str", "abcd", "abxx", 0),  # a similarity of 0.5 is cut
        ("Str", "R&D", "R&amp;D", 0),
        ("Str", "'Fact Checker' (beta)", "fact checker", 1),
        ("Str", "page 12", "page 13", 0),
        ("Str", "555-1234", "555-1235", 0),
        ("Str", "2008-05-01", "2008-05-02", 0),
        ("Str", "9:30 a.m.", "9:31 a.m.", 0),
        ("Str", "https://a.org/x", "https://a.org/y", 0),
        ("Str", "me@a.org", "mee@a.org", 0),
        ("Str", "setup.py", "setap.py", 0),
        ("None", "Not answerable", "Not answerable", 1),
        ("None", "Not answerable", "", 0),
        ("List", LIST, "['blue', 'white', '10']", 1),
        ("List", LIST, "['blue', 'white', '11']", 0),
        ("List", LIST, "['blue', 'white']", 0),
        ("List", LIST, "blue, white, 10%", 0),
        ("List", "['green', 'white']", "['grean', 'white']", 0.8),
        ("List", "['Page 1', 'Page 5']", "['page 5', 'page 1']", 1),
        ("List", "['1981', '1982']", "[1982, 1981]", 1),
        ("List", "['Fact Checker']", "fact checker", 1),
        ("", "abcd", "abxd", 0.75),  # unknown to the benchmark: free text
    ],
)
def test_mmlongbench(answer_format, gold, answer, score):
    assert mmlongbench_score(gold, answer, answer_format) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer_format", "gold", "answer", "score"),
    [
        ("Float", "n/a", "N/A", 1),
        ("Float", "n/a", "3", 0),
        ("List", "[]", "[]", 1),
        ("List", "['a', 'b']", "[a, b", 0),
        ("List", "['a']", "[" * 100_000, 0),
        ("List", "['a']", "[b]", 0),
    ],
)
def test_mmlongbench_where_the_public_scorer_raises(answer_format, gold, answer, score):
    assert mmlongbench_score(gold, answer, answer_format) == score


DIFFERS = {"S03", "S05", "S06", "S07", "S13", "S15"}
"""Rows of case C4 where the official rules say otherwise than right; listed in docs/evaluation.md."""


def test_case_c4_and_c5():
    PWNED.unlink(missing_ok=True)
    rows = [json.loads(line) for line in case_file("score_cases.jsonl").read_text().splitlines()]
    differs, judge = set(), MMLongBenchJudge()
    for row in rows:
        question = Question(
            question_id=row["id"],
            text=row.get("question", "Q?"),
            gold_answers=[row["gold"]],
            answer_format=row["format"],
        )
        official = judge.verdict_on(question, row["pred"])
        assert official.value == (official.score > 0)
        if official.value != bool(row["right"]):
            differs.add(row["id"])
        assert matches_any(row["pred"], [row["gold"]]) == bool(row["right"]), row["id"]
        SlideVQAJudge().verdict_on(question, row["pred"])
    assert differs == DIFFERS
    assert not PWNED.exists()


def test_mmlongbench_takes_an_admission_as_not_answerable():
    judge = MMLongBenchJudge()
    unanswerable = Question(question_id="q", text="Q?", gold_answers=["Not answerable"], answer_format="None")
    number = unanswerable.model_copy(update={"gold_answers": ["5"], "answer_format": "Int"})
    assert judge.verdict_on(unanswerable, "I could not find it in the documents.").value is True
    assert judge.verdict_on(unanswerable, "5").value is False
    assert judge.verdict_on(number, "Not answerable").value is False
    assert judge.verdict_on(unanswerable, " ").value is False


def slow_distance(one: str, other: str) -> int:
    if not one or not other:
        return len(one) + len(other)
    return min(
        slow_distance(one[1:], other) + 1,
        slow_distance(one, other[1:]) + 1,
        slow_distance(one[1:], other[1:]) + (one[0] != other[0]),
    )


short = st.text("ab1", max_size=6)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(short, short)
def test_anls_by_a_slow_distance(gold, answer):
    distance = slow_distance(gold, answer)
    assert edit_distance(gold, answer) == distance
    similarity = 1 - distance / (max(len(gold), len(answer)) or 1)
    assert anls(gold, answer) == (similarity if similarity > 0.5 else 0)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.text(max_size=12), st.text(max_size=12), st.sampled_from(["Int", "Float", "Str", "List", "None"]))
def test_no_text_raises_and_scores_stay_between_0_and_1(gold, answer, answer_format):
    assert 0 <= mmlongbench_score(gold, answer, answer_format) <= 1
    assert 0 <= mmlongbench_score(f"[{gold}", f"[{answer}", answer_format) <= 1
    assert 0 <= answer_match(f"how many{answer}", gold, answer).f1 <= 1


def test_a_list_is_read_as_a_literal():
    assert read_list("['a', 1]") == ["a", 1]
    text = f"[__import__('os').system('touch {PWNED}')]"
    assert read_list(text) == [text]
    assert not os.path.exists(PWNED)


@pytest.mark.parametrize(
    ("question", "gold", "answer", "exact", "f1"),
    [
        ("Q?", "The Eiffel Tower", "eiffel tower.", True, 1),
        ("Q?", "eiffel tower", "tower", False, 2 / 3),
        ("Q?", "12 percent", "12%", True, 1),
        ("Q?", "twelve", "12", True, 1),
        ("Q?", "R & D", "R and D", True, 1),
        ("Q?", "yes", "Yes, it does", True, 1),
        ("Q?", "no", "north america", False, 0),
        ("Q?", "brand", "br", True, 1),  # "and" counts as a comma inside a word too
        ("how many ships are there?", "5 ships", "5", True, 1),
        ("How many ships are there?", "5 ships", "5", False, 2 / 3),
        ("which color is it?", "red color", "red", True, 1),
        ("Q?", "5 hours", "5 hrs", True, 1),
        ("Q?", "the", "the", False, 0),  # nothing is left of either
        ("Q?", "1.5", "15", True, 1),  # the point is punctuation
        ("Q?", "b b c", "b c c", False, 2 / 3),
    ],
)
def test_slidevqa(question, gold, answer, exact, f1):
    match = answer_match(question, gold, answer)
    assert (match.exact, match.f1) == (exact, pytest.approx(f1))
    verdict = SlideVQAJudge().verdict(question, ["something else", gold], answer)
    assert (verdict.value, verdict.score) == (exact, pytest.approx(f1))


def test_a_question_that_ends_with_how_many_takes_nothing_away():
    assert normalise("5 ships", "the total is how many") == "5 ships"


def test_slidevqa_evidence_counts_each_page_once_in_any_order():
    match = evidence_match(["p2", "p1"], ["p1", "p2", "p1"])
    assert (match.exact, match.f1) == (True, 1)
    match = evidence_match(["p1", "p2"], ["p1", "p3", "p4", "p5"])
    assert (match.exact, match.precision, match.recall) == (False, 0.25, 0.5)
    assert evidence_match(["p1"], []).f1 == 0
    joint = match.joint(answer_match("Q?", "5", "5"))
    assert (joint.exact, joint.precision, joint.recall) == (False, 0.25, 0.5)
