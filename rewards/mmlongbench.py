"""MMLongBench-Doc's rule-based scorer: one answer → 0 to 1, by the format of the gold answer.

The rules are those of the benchmark's public scorer, oddities included, so that figures stand beside the
published ones. What it does otherwise, on purpose, is listed in `docs/evaluation.md`.
"""

from __future__ import annotations

import re
from math import isclose, isfinite
from typing import Any

from visor.literals import list_literal

NOT_ANSWERABLE = "Not answerable"
FORMATS = ("Int", "Float", "Str", "List", "None")
ANLS_CUT = 0.5
"""A similarity of this or less counts 0."""
FLOAT_TOLERANCE = 0.01
"""Relative."""
LEAST_DECIMALS = 2
_PARENTHESES = re.compile(r"\s*\([^)]*\)")
_QUOTES = re.compile(r"^['\"]|['\"]$")
_EXACT = re.compile(
    r"""
    \d+([-\s]\d+)?                              # telephone numbers, and any other whole number
    | \d{4}[-\s]\d{2}([-\s]\d{2})?              # YYYY-MM, YYYY-MM-DD
    | [a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}
    """,
    re.VERBOSE,
)


def mmlongbench_score(gold: str, answer: str, answer_format: str) -> float:
    """Score an answer against the gold answer, both as they are written.

    Int: equal after the answer is cut to a whole number. Float: equal within 1 %, or when rounded, and so at
    a hundredth and a hundred times the gold. Str and None: ANLS, cut at 0.5; exact for addresses, pages,
    telephone numbers, times and dates. List: 0 for another length, else the least ANLS of the sorted pairs.
    Any other format is Str.
    """
    if answer_format == "Int":
        return float(_int_equal(gold, answer))
    if answer_format == "Float":
        return float(_float_equal(gold, answer))
    if answer_format == "List":
        return _list_score(read_list(gold), read_list(answer))
    return _text_score(clean(gold), clean(answer))


def clean(text: Any) -> str:
    """Lower case, without what stands in parentheses, one quote at each end, `$` before and `%` after."""
    text = _PARENTHESES.sub("", str(text).lower().strip()).strip()
    return _QUOTES.sub("", text).strip().lstrip("$").strip().rstrip("%").strip()


def read_list(text: str) -> list[Any]:
    """The elements of a list that is written as a literal; any other text is one element."""
    elements = list_literal(text)
    return [text] if elements is None else elements


def anls(gold: str, answer: str) -> float:
    """1 − edit distance / length of the longer, 0 where that is 0.5 or less."""
    longer = max(len(gold), len(answer))
    if longer == 0:
        return 1.0
    if 1 - abs(len(gold) - len(answer)) / longer <= ANLS_CUT:
        return 0.0  # the distance is at least the difference in length
    similarity = 1.0 - edit_distance(gold, answer) / longer
    return similarity if similarity > ANLS_CUT else 0.0


def edit_distance(one: str, other: str) -> int:
    """Levenshtein's: insertions, deletions and substitutions, each 1."""
    row = list(range(len(other) + 1))
    for i, left in enumerate(one, start=1):
        diagonal, row[0] = row[0], i
        for j, right in enumerate(other, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (left != right))
    return row[-1]


def is_exact(gold: str) -> bool:
    """Whether a cleaned gold answer is compared letter by letter."""
    return (
        "https://" in gold
        or gold.endswith((".py", "ipynb"))
        or gold.startswith("page")
        or "a.m." in gold
        or "p.m." in gold
        or _EXACT.fullmatch(gold) is not None
    )


def _int_equal(gold: str, answer: str) -> bool:
    try:
        return int(gold) == int(float(answer))
    except (ValueError, OverflowError):
        return False


def _float_equal(gold: str, answer: str) -> bool:
    try:
        wanted = float(clean(gold))
    except ValueError:
        return _text_score(clean(gold), clean(answer)) == 1.0
    try:
        given = float(clean(answer))
    except ValueError:
        return False
    return any(_near(value, given) for value in (wanted / 100, wanted, wanted * 100))


def _near(wanted: float, given: float) -> bool:
    if not (isfinite(wanted) and isfinite(given)):
        return False
    if isclose(wanted, given, rel_tol=FLOAT_TOLERANCE):
        return True
    decimals = max(min(_decimals(given), _decimals(wanted)), LEAST_DECIMALS)
    return round(given, decimals) == round(wanted, decimals)


def _decimals(value: float) -> int:
    """Digits after the point of a number as Python writes it; 3 where it writes none."""
    _, point, decimals = str(value).partition(".")
    return len(decimals) if point else 3


def _text_score(gold: str, answer: str) -> float:
    return float(gold == answer) if is_exact(gold) else anls(gold, answer)


def _list_score(gold: list[Any], answer: list[Any]) -> float:
    if len(gold) != len(answer):
        return 0.0
    wanted, given = sorted(map(clean, gold)), sorted(map(clean, answer))
    if not wanted:
        return 1.0
    if _is_number(wanted[0]) or is_exact(wanted[0]):
        return float(wanted == given)
    return min(map(anls, wanted, given))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
