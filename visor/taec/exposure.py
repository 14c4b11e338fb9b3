"""Memory exposure: in what form earlier observations are shown again (TAEC, eq. 3 and appendix A.4)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

import yaml

from visor.env.phrases import GuardedPhrases, PhraseFile
from visor.taec.text import normalise
from visor.types import Record

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


class CueFile(Record):
    """The data file of cues."""

    failure: PhraseFile
    confidence: PhraseFile
    unclear: PhraseFile | None = None
    """Failures that are no plain absence; they tell a dead end's kind, in the DAG agent's hints only."""


class Cues:
    """Phrases that tell the role of an observation. White space within a line does not matter.

    Texts are read once and remembered: every prompt shows the same ones again.
    """

    def __init__(self, phrases: CueFile):
        self._failure = _remembered(phrases.failure)
        self._confidence = _remembered(phrases.confidence)
        self._unclear = _remembered(phrases.unclear or PhraseFile(patterns=[]))

    def failed(self, text: str) -> bool:
        """Whether the text says that the search led nowhere."""
        return self._failure(text)

    def confident(self, text: str) -> bool:
        """Whether the text states something as established, and does not deny it."""
        return self._confidence(text)

    def unclear(self, text: str) -> bool:
        """Whether a failure is that something cannot be made out."""
        return self._unclear(text)


def _remembered(phrases: PhraseFile) -> Callable[[str], bool]:
    matcher = GuardedPhrases(phrases)
    return lru_cache(maxsize=8192)(lambda text: matcher.match(_lines(text)))


def _lines(text: str) -> str:
    return "\n".join(normalise(line) for line in text.splitlines())


@lru_cache(maxsize=8)
def load_cues(path: Path = CUES_FILE) -> Cues:
    """Read a cue file. Raises ValueError for one that has not the form of the shipped one."""
    return Cues(CueFile.model_validate(yaml.safe_load(path.read_text(encoding="utf-8"))))


def persistence(decay_rate: float, age: float) -> float:
    """e^{−λ_g Δt}, the first component of eq. 3; `age` in nodes of the trajectory graph."""
    return math.exp(-decay_rate * age)


def role(text: str, cues: Cues) -> Role:
    """Tell the role of an observation from its text (appendix A.4).

    A failure cue means failed; a confidence cue without one, resolved; anything else is active.
    """
    if cues.failed(text):
        return Role.FAILED
    return Role.RESOLVED if cues.confident(text) else Role.ACTIVE


def sentences(text: str) -> list[str]:
    """The sentences of a text, stripped, empty ones left out."""
    return [sentence.strip() for sentence in _SENTENCE_END.split(text) if sentence.strip()]


def condense(text: str, cues: Cues) -> str:
    """The first sentence with a confidence cue; the whole text when none has one of its own."""
    return next((sentence for sentence in sentences(text) if cues.confident(sentence)), text)


def shortest(text: str, cues: Cues) -> str:
    """One sentence for a text that has to be short: its first confident one, else its first."""
    said = sentences(text)
    return next((sentence for sentence in said if cues.confident(sentence)), said[0] if said else text)


def trace(template: str, query: str) -> str:
    """The line that stands for a failed branch; `{query}` in the template becomes the abandoned query."""
    return template.replace("{query}", " ".join(query.split()))
