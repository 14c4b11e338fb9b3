"""Tokens, similarity and slot matching."""

from __future__ import annotations

import pytest

from visor.taec.text import jaccard, normalise, occurs, tokens


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Net Sales 2023: 1,577.5", {"net", "sales", "2023", "1,577.5"}),
        ("2023年总收入 Net-sales", {"2023", "年", "总", "收", "入", "net", "sales"}),
        ("Q3 Ärger straße", {"q", "3", "ärger", "strasse"}),
        ("売上 カナ 한국", {"売", "上", "カ", "ナ", "한", "국"}),
        ("１２％", {"12"}),
        ("... — !", set()),
    ],
)
def test_tokens_are_cjk_characters_words_and_numbers(text, expected):
    assert tokens(text) == expected


def test_jaccard_by_hand():
    assert jaccard(tokens("red blue green"), tokens("blue green grey black")) == pytest.approx(2 / 5)
    assert jaccard(tokens("总收入"), tokens("总支出")) == pytest.approx(1 / 5)
    assert jaccard(frozenset(), frozenset()) == 0.0


def test_slot_occurs_as_a_substring_whatever_case_width_and_line_breaks():
    assert occurs("Net Sales", "table of net\n  sales by year")
    assert occurs("总收入", "2023年公司总收入为五亿")
    assert occurs("straße", "HAUPTSTRASSE 5")
    assert not occurs("net sales", "net of sales")
    assert normalise("  Ａ\tb\n") == "a b"
