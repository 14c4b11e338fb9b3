"""Memory exposure: in what form earlier observations are shown again (TAEC, eq. 3 and appendix A.4)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

import yaml

from visor.taec.text import CJK, normalise

CUES_FILE = Path(__file__).with_name("cues.yaml")
# A full stop ends a sentence when white space follows (3.9 does not), a CJK one always does.
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])\s*|\n+")


class Role(StrEnum):
    """s_{m,t}: what an observation is to the reasoning now."""

    ACTIVE = "active"
    """Still open or uncertain: shown in full."""
    RESOLVED = "resolved"
    """States an established fact: condensed."""
    FAILED = "failed"
    """An abandoned branch: a terminal trace."""


@dataclass(frozen=True)
class Cues:
    """Phrases that tell the role of an observation."""

    failure: re.Pattern[str]
    confidence: re.Pattern[str]
    negated: re.Pattern[str]
    """Matches the end of the text before a confidence cue that denies it ("not yet ", "不")."""

    def failed(self, text: str) -> bool:
        return self.failure.search(normalise(text)) is not None

    def confident(self, text: str) -> bool:
        form = normalise(text)
        return any(not self.negated.search(form[: hit.start()]) for hit in self.confidence.finditer(form))


def _phrases(phrases: list[str]) -> re.Pattern[str]:
    """Match any phrase: as whole words where it is written in an alphabet, anywhere where it is CJK."""
    forms = [re.escape(normalise(phrase)) for phrase in phrases]
    bounded = [form if re.match(f"[{CJK}]", form) else rf"\b{form}\b" for form in forms]
    return re.compile("|".join(bounded))


@lru_cache(maxsize=8)
def load_cues(path: Path = CUES_FILE) -> Cues:
    """Read a cue file: lists `failure`, `confidence`, `negation_words`, `negation_prefixes`.

    Raises ValueError when one of the lists is missing or empty.
    """
    lists = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    for key in ("failure", "confidence", "negation_words", "negation_prefixes"):
        if not isinstance(lists, dict) or not lists.get(key):
            raise ValueError(f"the cue file {path} has no list {key!r}; see {CUES_FILE.name} for the form")
    words = "|".join(re.escape(normalise(word)) for word in lists["negation_words"])
    prefixes = "|".join(re.escape(normalise(prefix)) for prefix in lists["negation_prefixes"])
    # Up to two words may stand between the negation and the cue: "could not yet be confirmed".
    negated = re.compile(rf"(?:\b(?:{words})(?:\s\w+){{0,2}}\s|(?:{prefixes}))$")
    return Cues(_phrases(lists["failure"]), _phrases(lists["confidence"]), negated)


def persistence(decay_rate: float, age: float) -> float:
    """e^{−λ_g Δt}, the first component of eq. 3; `age` in nodes of the trajectory graph."""
    return math.exp(-decay_rate * age)


def role(text: str, cues: Cues, *, dead_end: bool = False) -> Role:
    """Tell the role of an observation from its text (appendix A.4).

    A failure cue, or a query on the dead-end list, means failed; a confidence cue without one, resolved;
    anything else is active.
    """
    if dead_end or cues.failed(text):
        return Role.FAILED
    return Role.RESOLVED if cues.confident(text) else Role.ACTIVE


def sentences(text: str) -> list[str]:
    """The sentences of a text, stripped, empty ones left out."""
    return [sentence.strip() for sentence in _SENTENCE_END.split(text) if sentence.strip()]


def condense(text: str, cues: Cues) -> str:
    """The first sentence with a confidence cue; the whole text when none has one of its own."""
    return next((sentence for sentence in sentences(text) if cues.confident(sentence)), text)


def trace(template: str, query: str) -> str:
    """The line that stands for a failed branch; `{query}` in the template becomes the abandoned query."""
    return template.replace("{query}", " ".join(query.split()))
