import unicodedata

import pytest

from visor.retrieval.snippet import snippet
from visor.retrieval.tokenizer import tokenize


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("", []),
        ("  \n\t", []),
        ("...!?—", []),
        ("😀‍😀", []),
        ("The Quick-Brown fox's", ["the", "quick", "brown", "fox", "s"]),
        ("1,577 items", ["1577", "items"]),
        ("$1,234,567.89", ["1234567.89"]),
        ("12.5bn in 2015,2016", ["12.5", "bn", "in", "2015", "2016"]),
        ("1,5772", ["1", "5772"]),
        ("Q3 FY15", ["q3", "fy15"]),
        ("snake_case", ["snake", "case"]),
        ("Straße", ["strasse"]),
        ("ﬁnance", ["finance"]),
        ("ＡＢＣ１２", ["abc12"]),
        ("profit²", ["profit"]),
        ("营业收入", ["营业", "业收", "收入"]),
        ("年", ["年"]),
        ("2015年GDP增长", ["2015", "年", "gdp", "增长"]),
        ("カタカナ", ["カタ", "タカ", "カナ"]),
        ("हिन्दी", ["हिन्दी"]),
        ("a&b=c?d#e%20f +g", ["a", "b", "c", "d", "e", "20f", "g"]),
        ("<|image_pad|> chart", ["image", "pad", "chart"]),
    ],
)
def test_terms(text, terms):
    assert tokenize(text) == terms


@pytest.mark.parametrize("word", ["Übersicht", "naïve", "Việt", "한국어", "ガ"])
def test_both_spellings_of_an_accent_are_one_term(word):
    assert tokenize(unicodedata.normalize("NFD", word)) == tokenize(unicodedata.normalize("NFC", word)) != []


def test_snippet_shows_the_matching_line():
    text = "Title\n\nRevenue grew in 2015\nOther\x1b[31m line"
    assert snippet(text, "revenue 2015") == "Revenue grew in 2015"
    assert "\x1b" not in snippet(text, "other")
    assert snippet(text, "revenue", width=8) == "Revenue…"
    assert snippet("", "x") == ""
