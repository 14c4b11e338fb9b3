"""SlideVQA's scorers: normalised exact match and token F1 of answers, and the same over evidence pages.

The normalisation is that of the benchmark's public scorer, oddities included ("and" counts as a comma even
inside a word), so that figures stand beside the published ones. What is otherwise, on purpose, is listed in
`docs/evaluation.md`.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

_NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
).split()
_DIGITS = {word: str(value) for value, word in enumerate(_NUMBERS)}
_REPLACED = (
    ("this is ", ""),
    ("it is ", ""),
    ("&", ","),
    ("and", ","),
    ("percent", ""),
    ("organisation", "organization"),
    ("because of", ""),
    ("because", ""),
    ("due to", ""),
    ("hours", "hrs"),
    ("minites", "min"),  # as the public scorer spells it
)
"""In this order, anywhere in the text."""
_UNIT_AFTER = ("how many", "which")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Match:
    """How well a prediction matches its gold; all 0 where they share nothing."""

    exact: bool = False
    precision: float = 0.0
    recall: float = 0.0

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall."""
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total else 0.0

    def joint(self, other: Match) -> Match:
        """Answer and evidence together: precisions and recalls multiplied, exact where both are."""
        return Match(self.exact and other.exact, self.precision * other.precision, self.recall * other.recall)


def answer_match(question: str, gold: str, answer: str) -> Match:
    """Compare the normalised words of an answer with those of the gold answer."""
    wanted, given = normalise(gold, question).split(), normalise(answer, question).split()
    return overlap(wanted, given, exact=wanted == given)


def evidence_match(gold: Sequence[str], pages: Sequence[str]) -> Match:
    """Compare page ids, each counted once and in any order."""
    wanted, given = list(dict.fromkeys(gold)), list(dict.fromkeys(pages))
    return overlap(wanted, given, exact=set(wanted) == set(given))


def overlap(wanted: Sequence[Hashable], given: Sequence[Hashable], exact: bool) -> Match:
    """Precision and recall of the shared members, repeats counted."""
    shared = sum((Counter(wanted) & Counter(given)).values())
    return Match(exact, shared / len(given), shared / len(wanted)) if shared else Match()


def normalise(text: str, question: str) -> str:
    """The text in lower case without articles, punctuation, stock phrases and the unit that the question
    names (the word after "how many" or "which"); number words below twenty as digits. A text that begins with
    "yes" or "no" is cut to its first word."""
    text = text.lower()
    for phrase, instead in _REPLACED:
        text = text.replace(phrase, instead)
    for phrase in _UNIT_AFTER:
        # The public scorer looks for the phrase in the question as it is written, in lower case only.
        after = question.partition(phrase)[2].split()
        if after:
            text = text.replace(after[0], "")
    text = _ARTICLES.sub(" ", text.translate(_WITHOUT_PUNCTUATION))
    words = text.split()
    if text.startswith(("yes", "no")):
        words = words[:1]
    return " ".join(_DIGITS.get(word, word) for word in words)
