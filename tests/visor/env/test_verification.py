import time

import pytest

from visor.env.phrases import GuardedPhrases, PhraseFile
from visor.env.verification import is_verification


@pytest.mark.parametrize(
    "think",
    [
        "the answer is 3 . verify it",
        "I want to do a verification round",
        "I can now answer the question. I want to do a verification round, so I will search again.",
        "I have enough information to answer. I will do one final verification search.",
        "The total is 1,234.5. Let me double-check.",
        "This is not contradicted anywhere, so let me verify it with another search.",
        "I do not see other values, but I will confirm the answer once more.",
        "I could not find a second table and I want to verify my answer.",
        "答案是42，我再搜索一次以验证答案。",
        "我需要进行一次验证。",
    ],
)
def test_thoughts_ready_to_be_confirmed(think):
    assert is_verification(think)


@pytest.mark.parametrize(
    "think",
    [
        "",
        "cannot confirm",
        "unable to verify",
        "I cannot confirm the answer from this page.",
        "I am unable to verify it yet.",
        "I don't want to verify it now.",
        "There is no need for a verification search.",
        "A verification search is not necessary.",
        "The verification search was already done.",
        "I need to find the year in which the site opened.",
        "I need to confirm the year of the launch first.",
        "The page confirmed the first value. I still need the second page.",
        "I have to verify that the fund exists.",
        "无法验证答案，继续搜索。",
        "不需要进行验证。",
    ],
)
def test_thoughts_that_are_not(think):
    assert not is_verification(think)


def test_guards_look_at_their_side_of_the_match_only():
    phrases = GuardedPhrases(
        PhraseFile(patterns=["yes"], guards_before=["never"], guards_after=["maybe"], vetoes=["stop"])
    )
    assert phrases.match("YES")
    assert phrases.match("yes never")
    assert phrases.match("maybe yes")
    assert not phrases.match("never a yes")
    assert not phrases.match("yes or maybe")
    assert phrases.match("never, yes")
    assert phrases.match("never yes, yes")
    assert not phrases.match("yes, and stop")


def test_time_on_long_thoughts():
    started = time.perf_counter()
    for unit in ("verify it not ", "confirm the ", "one more search ", "再验证", "a", " "):
        is_verification(unit * (200_000 // len(unit)))
    assert time.perf_counter() - started < 5
