import time
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.answer import answers_match, matches_any
from rewards.honesty import is_refusal


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("The Eiffel  Tower.", "eiffel tower"),
        ("an apple", "Apple!"),
        ("A", "a"),
        ("R&amp;D", "R & D"),
        ("18.29", "18.29%"),
        ("0.1829", "18.29%"),
        ("21 %", "21%"),
        ("1,577", "$1577.00"),
        ("-5", "−5.0"),
        ("-$5", "$-5"),
        ("007", "7"),
        (".5", "0.50"),
        ("+3", "3"),
        ("-0", "0"),
        ("10–15", "10-15"),
        ("COVID 19", "Covid-19"),
        ("U.S.", "US"),
        ("it’s", "its"),
        ("５ ships", "5 ships"),
        ("北京", "北京。"),
        ("[]", "[]"),
        ("9" * 5000, "9" * 5000),
        ("Yes", "yes"),
        ("['10%', 'White']", "['White', '10%']"),
        ("[2, 'a', 2.0]", "['A', '2', '2']"),
        ("White, 10%", "['White', '10%']"),
        ("[White, 10%]", "['White', '10%']"),
    ],
)
def test_answers_that_say_the_same(answer, gold):
    assert answers_match(answer, gold)
    assert answers_match(gold, answer)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("3.9", "3"),
        ("15", "1.5"),
        ("-5", "5"),
        ("3.65%", "-3.65%"),
        ("1 5", "15"),
        ("1/2", "1-2"),
        ("10 15", "10-15"),
        ("1,5772", "15772"),
        ("5 million", "5"),
        ("5 %", "5 kg"),
        ("21", "0.21"),
        ("C++", "C"),
        ("C#", "C"),
        ("yes and no", "yes"),
        ("a", "the"),
        ("[]", "[a]"),
        ("12 ships", "12 shops"),
        ("['a', 'a', 'b']", "['a', 'b', 'b']"),
        ("['a']", "['a', 'a']"),
        ("[['a']]", "['b']"),
    ],
)
def test_answers_that_differ(answer, gold):
    assert not answers_match(answer, gold)
    assert not answers_match(gold, answer)


@pytest.mark.parametrize("answer", ["", "  ", "\n"])
def test_an_empty_answer_equals_nothing(answer):
    assert not matches_any(answer, ["", " ", "Not answerable"])


def test_a_list_that_is_not_closed_equals_no_list():
    assert not answers_match("[a, b", "['a', 'b']")


def test_any_of_the_gold_answers_will_do():
    assert matches_any("b", ["a", "B"])
    assert not matches_any("c", ["a", "B"])
    assert not matches_any("c", [])


numbers = st.decimals(-(10**7), 10**7, places=3)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(numbers, numbers, st.booleans(), st.booleans())
def test_numbers_are_compared_as_numbers(first, second, same, grouped):
    second = first if same else second
    written = f"{second:,f}" if grouped else f"{second:f}"
    assert answers_match(f"{first:f}", written) == (Decimal(first) == Decimal(second))


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.text(min_size=1).filter(str.strip))
def test_any_answer_equals_itself_in_any_case_and_spacing(text):
    assert answers_match(text, text)
    assert answers_match(f"  {text}\n", text)


def test_time_is_linear():
    started = time.perf_counter()
    for unit in ("1,", "1.", "a.", "- ", "$", "a'", "1,000", "&amp;", "the "):
        answers_match(unit * (200_000 // len(unit)), "x")
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize(
    "answer",
    [
        "not found",
        "Not found.",
        "The information was not found in the pages.",
        "I could not find the number of ships.",
        "It cannot be determined from the documents.",
        "I am unable to determine the year",
        "There is not enough information to answer.",
        "No relevant information is available.",
        "The documents mention 2019, however the 2020 figure is not available.",
        "The slides don't mention a budget",
        "I don't know",
        "Not answerable",
        "The answer is not found",
        "Unknown",
        "无法确定",
        "没有找到相关信息",
    ],
)
def test_answers_that_admit_missing_information(answer):
    assert is_refusal(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "5",
        "no",
        "the answer is 3",
        "He was not found guilty",
        "404 Not Found",
        "The default is used when the file is not found",
        "It is not stated, so it is 5.",
        "Although not mentioned, it is probably 5",
        "I could not find it, but I would guess 2019",
        "The page is missing, the answer is 42",
        "not only ships but boats",
        "the unknown soldier",
        "答案是5",
        "未提及，因此估计为5",
    ],
)
def test_answers_that_do_not(answer):
    assert not is_refusal(answer)
