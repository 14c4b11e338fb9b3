"""Is an answer equal to a gold answer? The rule judge's comparison: no model, no tolerance.

Case, whitespace, punctuation and English articles do not matter; numbers are compared as numbers, with
their sign and every decimal (3.9 is not 3, 1.5 is not 15, −5 is not 5).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from visor.env.actions import unescape
from visor.literals import list_literal

ARTICLES = frozenset({"a", "an", "the"})
DASHES = dict.fromkeys(map(ord, "‐‑‒–—―−"), "-")
CURRENCY = "$€£¥₹"
INITIALS = re.compile(r"\b(?:[^\W\d_]\.){2,}")
TOKEN = re.compile(
    rf"""
    (?P<sign>(?<![\w)\]%])[-+])?(?:[{CURRENCY}]\s?)?      # a sign stands after no letter, digit or bracket
    (?:
        (?P<whole>[0-9]{{1,3}}(?:,[0-9]{{3}})+(?![0-9])|[0-9]+)(?:\.(?P<decimals>[0-9]+))?
      | (?<![0-9])\.(?P<bare>[0-9]+)
    )
    | (?P<word>[^\W\d_](?:\w|(?<=\w)'(?=\w))*)
    | (?P<between>(?<=[0-9])[-/:](?=[0-9]))               # 10-15, 1/2, 10:30
    | (?P<symbol>[%&+#@=<>])
    """,
    re.VERBOSE,
)


@dataclass(frozen=True)
class Number:
    """A decimal number in canonical digits: no leading zero, no trailing zero after the point, no −0."""

    negative: bool
    whole: str
    decimals: str

    def times_100(self) -> Number:
        shifted = self.decimals.ljust(2, "0")
        return number(self.negative, self.whole + shifted[:2], shifted[2:])


def number(negative: bool, whole: str, decimals: str) -> Number:
    """Build the canonical number of these digits. Kept as text: exact at any length."""
    whole, decimals = whole.replace(",", "").lstrip("0"), decimals.rstrip("0")
    return Number(negative and bool(whole or decimals), whole or "0", decimals)


Token = str | Number


def tokens(text: str) -> list[Token]:
    """Split an answer into words, numbers and the symbols that carry meaning; articles are left out unless
    nothing else is there (the answer "A")."""
    text = unicodedata.normalize("NFKC", unescape(text)).translate(DASHES).casefold()
    text = INITIALS.sub(lambda match: match[0].replace(".", ""), text.replace("’", "'"))
    found = [_token(match) for match in TOKEN.finditer(text)]
    return [token for token in found if token not in ARTICLES] or found


def _token(match: re.Match[str]) -> Token:
    if match["whole"] is not None or match["bare"] is not None:
        return number(match["sign"] == "-", match["whole"] or "", match["decimals"] or match["bare"] or "")
    return match[0].replace("'", "")


def answers_match(answer: str, gold: str) -> bool:
    """True when the two say the same. An empty answer equals nothing.

    A lone number may carry a percent sign on one side only: 18.29 and 0.1829 both equal 18.29%.
    Where the gold answer is a list, a list with equal elements in any order is equal, and a list that is not
    closed is not. Answers without any word, number or symbol are compared as they stand ("[]").
    """
    if not answer.strip():
        return False
    elements = list_literal(gold.strip())
    if elements is not None and answer.strip().startswith("["):
        if not answer.strip().endswith("]"):
            return False
        given = list_literal(answer.strip())
        if given is not None:
            return _same_elements([str(item) for item in given], [str(item) for item in elements])
    mine, theirs = tokens(answer), tokens(gold)
    if not mine and not theirs:
        return answer.split() == gold.split()
    return mine == theirs or _percent_match(mine, theirs) or _percent_match(theirs, mine)


def _same_elements(answers: list[str], golds: list[str]) -> bool:
    """Whether each answer has a gold answer of its own that it equals."""
    left = list(golds)
    for answer in answers:
        equal = next(
            (i for i, gold in enumerate(left) if answer == gold or answers_match(answer, gold)), None
        )
        if equal is None:
            return False
        del left[equal]
    return not left


def _percent_match(percent: list[Token], plain: list[Token]) -> bool:
    match percent, plain:
        case [Number() as value, "%"], [Number() as other]:
            return other == value or other.times_100() == value
    return False


def matches_any(answer: str, gold_answers: Sequence[str]) -> bool:
    """True when the answer equals one of the gold answers."""
    return any(answers_match(answer, gold) for gold in gold_answers)
