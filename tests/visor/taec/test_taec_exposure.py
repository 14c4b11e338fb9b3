"""Roles of observations and their three forms."""

from __future__ import annotations

import math

import pytest

from visor.taec.exposure import Role, condense, load_cues, persistence, role, sentences, trace


@pytest.fixture(scope="module")
def cues():
    return load_cues()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The table lists five rows.", Role.ACTIVE),
        ("The chart clearly shows 5.", Role.RESOLVED),
        ("The Answer  is 3 . verify it", Role.RESOLVED),
        ("Revenue NOT FOUND on this page.", Role.FAILED),
        ("The answer is unclear.", Role.FAILED),
        ("This page does not contain it.", Role.FAILED),
        ("It is not confirmed.", Role.ACTIVE),
        ("It could not yet be confirmed.", Role.ACTIVE),
        ("Not on page 2. Confirmed here.", Role.RESOLVED),
        ("unconfirmed rumours", Role.ACTIVE),
        ("表格明确给出 5", Role.RESOLVED),
        ("数值不明确", Role.ACTIVE),
        ("未找到相关数据，但可以确定年份", Role.FAILED),
        ("图中无法看出", Role.FAILED),
        ("", Role.ACTIVE),
    ],
)
def test_role(cues, text, expected):
    assert role(text, cues) == expected


def test_condense_takes_the_first_confident_sentence(cues):
    text = "The page has a table. It clearly shows 3.9 million in 2023. The answer is 3.9. More rows follow."
    assert condense(text, cues) == "It clearly shows 3.9 million in 2023."
    assert condense("一张表。表格明确给出5。其余未提。", cues) == "表格明确给出5。"
    assert condense("page one . the answer is 3 . verify it", cues) == "the answer is 3 ."
    assert condense("nothing certain. at all.", cues) == "nothing certain. at all."


def test_sentences():
    assert sentences("A 3.9. B! C?\nD 你好。再见！") == ["A 3.9.", "B!", "C?", "D 你好。", "再见！"]


def test_trace_is_one_line_and_takes_the_query_literally():
    assert trace("gave up {query}", "a\n  {query} b") == "gave up a {query} b"


def test_persistence():
    assert persistence(0.1, 3) == pytest.approx(math.exp(-0.3))
    assert persistence(0.0, 50) == 1.0


def test_a_cue_file_without_a_list_is_refused_by_name(tmp_path):
    path = tmp_path / "cues.yaml"
    path.write_text("failure: {patterns: [gone]}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="confidence"):
        load_cues(path)
