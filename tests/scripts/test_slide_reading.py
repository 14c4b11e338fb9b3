"""What replies say about the pages they follow, and why episodes fail."""

import pytest
import study_helpers as helpers
from study_helpers import GOLD, OTHER, READ, SLIDES, THIRD, UNVERIFIED, VERIFIED, answer, episode, search

from rollout.results import result_row
from scripts.slide_reading import Cause, Says, cause, page_replies, starts_with


def replies(*steps):
    return episode(*steps).replies


def failure(*steps):
    made = episode(*steps)
    return cause(made.row, made.replies)


def test_a_page_is_read_when_the_thought_starts_with_it_whatever_the_whitespace():
    assert starts_with("amber  fox ,\nprofit 4 .  and more", "amber fox , profit 4 .")
    assert not starts_with("amber fox , profit 5 .", "amber fox , profit 4 .")
    assert not starts_with("so amber fox , profit 4 .", "amber fox , profit 4 .")
    assert not starts_with("amber fox , profit", "amber fox , profit 4 .")


def test_each_shown_page_is_judged_by_the_reply_after_it():
    first, second = replies(*VERIFIED)
    assert (first.page_id, first.gold, first.before_gold, first.exact) == (GOLD, True, True, True)
    assert (second.page_id, second.gold, second.before_gold, second.exact) == (OTHER, False, False, True)
    assert first.values == second.values == {"4"}
    assert [first.turn_index, second.turn_index] == [1, 2]


def test_an_invalid_reply_has_not_read_its_page_and_claims_nothing():
    (reply,) = replies((search(), GOLD), (f"<think> {READ[GOLD]} profit 4 .</think> 4", None))
    assert not reply.exact
    assert reply.says == Says.NEITHER
    assert not reply.values


def test_a_page_without_a_reply_is_left_out():
    assert replies((search(), GOLD)) == []


@pytest.mark.parametrize(
    ("thought", "says", "values"),
    [
        ("profit not found .", Says.ABSENT, set()),
        ("profit 7 . the answer is 7 .", Says.VALUE, {"7"}),
        ("the answer is 7 .", Says.VALUE, {"7"}),
        ("tax not found .", Says.NEITHER, set()),
        ("profit not found . profit 3 .", Says.VALUE, {"3"}),
        ("", Says.NEITHER, set()),
    ],
)
def test_what_a_thought_says_after_its_description(thought, says, values):
    (reply,) = replies((search(), THIRD), (search(f"{READ[THIRD]} {thought}"), None))
    assert (reply.says, set(reply.values)) == (says, values)


def test_the_description_itself_claims_nothing():
    """THIRD carries a profit, of another company."""
    (reply,) = replies((search(), THIRD), (search(f"{READ[THIRD]} profit not found ."), None))
    assert reply.exact
    assert reply.says == Says.ABSENT


@pytest.mark.parametrize(
    ("text", "says"), [("3", Says.VALUE), ("not found", Says.ABSENT), ("", Says.NEITHER)]
)
def test_an_answer_is_a_claim_unless_it_refuses(text, says):
    (reply,) = replies((search(), OTHER), (answer(READ[OTHER], text), None))
    assert reply.says == says


def test_a_page_that_the_slides_lack_is_named():
    made = helpers.trajectory(*UNVERIFIED)
    row = result_row(made, helpers.QUESTION)
    with pytest.raises(ValueError, match="not among the slides"):
        page_replies(made, row, {OTHER: SLIDES[OTHER]})


# ---------------------------------------------------------------- causes


def test_a_right_answer_after_complete_retrieval_has_no_cause():
    assert failure(*VERIFIED) is None
    assert failure(*UNVERIFIED) is None


def test_no_answer_comes_before_any_other_cause():
    assert failure((search(), OTHER), (search(f"{READ[OTHER]} profit 4 ."), GOLD)) == Cause.NO_ANSWER
    assert failure((search(), GOLD), (answer(READ[GOLD], ""), None)) == Cause.NO_ANSWER


def test_a_lucky_guess_without_the_gold_page_is_an_error():
    guess = (search(), OTHER), (answer(f"{READ[OTHER]} profit 4 .", "4"), None)
    assert episode(*guess).row.correct
    assert failure(*guess) == Cause.CLAIMED


def test_giving_up_before_the_gold_page():
    assert failure((search(), OTHER), (answer(READ[OTHER], "not found"), None)) == Cause.NEVER_COMPLETE


def test_a_misread_gold_page():
    assert (
        failure((search(), GOLD), (answer("amber fox , profit 5 . profit 5 .", "5"), None)) == Cause.MISREAD
    )
    assert failure((search(), GOLD), (answer(READ[GOLD], "not found"), None)) == Cause.MISREAD


def test_a_claim_counts_unless_the_gold_page_corrects_it():
    claim = (search(), OTHER), (search(f"{READ[OTHER]} profit 1 . verify it"), GOLD)
    kept = answer(f"{READ[GOLD]} confirmed . profit 1 .", "1")
    corrected = search(f"{READ[GOLD]} profit 4 .")
    assert failure(*claim, (kept, None)) == Cause.CLAIMED
    assert failure(*claim, (corrected, THIRD), (answer(READ[THIRD], "9"), None)) == Cause.VERIFICATION


def test_a_page_after_the_gold_one_takes_the_answer_away():
    wrong = answer(f"{READ[OTHER]} confirmed . profit 8 .", "8")
    assert failure(*VERIFIED[:2], (wrong, None)) == Cause.VERIFICATION


def test_thinking_right_and_answering_wrong_at_the_gold_page_is_a_misreading():
    """The reply claims two values, one of them wrong."""
    assert failure((search(), GOLD), (answer(f"{READ[GOLD]} profit 4 .", "7"), None)) == Cause.MISREAD


def test_read_right_and_then_answered_wrong_without_another_page():
    steps = (search(), GOLD), (search(f"{READ[GOLD]} profit 4 . verify it"), None), (answer("so", "7"), None)
    assert failure(*steps) == Cause.OTHER
