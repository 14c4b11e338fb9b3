"""What the answer needs: the slots of a question and the weight each still carries (TAEC, appendix A.2)."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from visor.models.base import PolicyClient, Request, Sampling
from visor.taec.text import CJK, normalise, occurs
from visor.types import derive_seed, text_message

MAX_SLOTS = 4
MAX_SLOT_CHARS = 60
"""A longer line of a reply is a sentence, not a keyword."""

_STOPWORDS_FILE = Path(__file__).with_name("stopwords.yaml")
# A year or month keeps its unit (2023年), which would otherwise lead the next run.
_WORD = re.compile(rf"\d+[年月日]|[{CJK}]+|(?:(?![{CJK}])[^\W_])+(?:[-.,'’](?:(?![{CJK}])[^\W_])+)*%?")
_CJK_RUN = re.compile(rf"[{CJK}]+")
_POSSESSIVE = re.compile(r"['’]s?$")
_LIST_MARK = re.compile(r"^\s*(?:[-*•·]|\(?\d{1,2}[.)、:](?!\d))\s*")

SLOT_PROMPT = (
    "A reader will search a collection of pages to answer the question below. Name the two to four pieces of "
    "information the answer depends on, each as one short keyword in the words of the question. "
    "Reply with a JSON list of strings and nothing else.\n\nQuestion: "
)


@dataclass(frozen=True)
class SlotSet:
    """The slots of one question and where they come from; kept in the trajectory's record."""

    keywords: tuple[str, ...]
    """At most MAX_SLOTS, in the order they were named, no two equal in normal form."""
    extractor: str
    """"rules", "model", or "rules (…)" with the reason why a model's reply could not be used."""
    model_calls: int = 0
    """Calls made for this very record: 1, or 0 for rules and for a reply that was cached."""

    def record(self) -> dict[str, Any]:
        return {
            "keywords": list(self.keywords),
            "extractor": self.extractor,
            "model_calls": self.model_calls,
        }


@dataclass
class RequirementState:
    """U_t = {(u, w̄_u)}: the slots with weights that sum to 1, and how far each is supported."""

    weights: dict[str, float]
    """w_u, uniform unless given otherwise."""
    support: dict[str, float] = field(default_factory=dict)
    """Share of the slot that evidence supports already, in [0, 1]; missing = 0."""

    @classmethod
    def uniform(cls, keywords: Iterable[str]) -> RequirementState:
        slots = list(keywords)
        return cls({slot: 1 / len(slots) for slot in slots})

    def add_support(self, texts: Iterable[str]) -> None:
        """Count every slot that occurs in one of the texts, thoughts or captions, as supported."""
        for text in texts:
            for slot in self.weights:
                if occurs(slot, text):
                    self.support[slot] = 1.0

    def open_weights(self) -> dict[str, float]:
        """w̄_u = w_u · (1 − support_u), the weight each slot still carries."""
        return {slot: weight * (1 - self.support.get(slot, 0.0)) for slot, weight in self.weights.items()}


@lru_cache(maxsize=1)
def _stopwords() -> tuple[frozenset[str], re.Pattern[str]]:
    """English stop words, and a pattern that cuts a CJK run at its function words (longest first)."""
    lists = yaml.safe_load(_STOPWORDS_FILE.read_text(encoding="utf-8"))
    cuts = sorted(lists["chinese"], key=len, reverse=True)
    return frozenset(lists["english"]), re.compile("|".join(map(re.escape, cuts)))


def _content_words(question: str) -> list[str]:
    """Content words of the question in order: words outside the stop list, CJK runs cut at function words."""
    english, cuts = _stopwords()
    words: list[str] = []
    for word in _WORD.findall(question):
        if _CJK_RUN.fullmatch(word):
            words += [piece for piece in cuts.split(word) if len(piece) > 1]
            continue
        word = _POSSESSIVE.sub("", word)
        if normalise(word) not in english and (len(word) > 1 or word.isdigit()):
            words.append(word)
    return words


def _distinct(keywords: Iterable[str]) -> list[str]:
    """Drop keywords equal to an earlier one in normal form."""
    first: dict[str, str] = {}
    for keyword in keywords:
        first.setdefault(normalise(keyword), keyword)
    return list(first.values())


def rule_slots(question: str, limit: int = MAX_SLOTS) -> SlotSet:
    """Up to `limit` content words of the question, with no model call.

    When there are more, names and numbers (a capital or a digit) go before other words and longer words
    before shorter ones; the kept words stand in the order of the question.
    """
    words = _distinct(_content_words(question))

    def preference(position: int) -> tuple[bool, int, int]:
        word = words[position]
        specific = any(character.isdigit() or character.isupper() for character in word)
        return (not specific, -len(word), position)

    kept = sorted(sorted(range(len(words)), key=preference)[:limit])
    return SlotSet(tuple(words[position] for position in kept), extractor="rules")


def parse_slots(reply: str, limit: int = MAX_SLOTS) -> list[str]:
    """Keywords of a model's reply: a JSON list of strings, else one a line or separated by commas."""
    start, end = reply.find("["), reply.rfind("]")
    items: list[str] | None = None
    if 0 <= start < end:
        try:
            parsed = json.loads(reply[start : end + 1])
        except ValueError:
            parsed = None
        if isinstance(parsed, list) and all(isinstance(item, str | int | float) for item in parsed):
            items = [str(item) for item in parsed]
    if items is None:
        items = [_LIST_MARK.sub("", piece) for piece in re.split(r"[\n,;，、；]", reply)]
    cleaned = (" ".join(item.strip(" \t\"'“”`[]").split()) for item in items)
    return _distinct(item for item in cleaned if 0 < len(item) <= MAX_SLOT_CHARS)[:limit]


class ModelSlotExtractor:
    """One model call a question at temperature 0, cached by its text; safe for concurrent episodes."""

    def __init__(self, client: PolicyClient, limit: int = MAX_SLOTS):
        self.client = client
        self.limit = limit
        self._known: dict[str, SlotSet] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def extract(self, question: str) -> SlotSet:
        """Return the question's slots; a reply without a keyword falls back to the rules, and says so.

        A fault of the client is raised as it is: the caller records it on the trajectory.
        """
        async with self._locks.setdefault(question, asyncio.Lock()):
            if question in self._known:
                return replace(self._known[question], model_calls=0)
            slots = await self._ask(question)
            self._known[question] = slots
        return slots

    async def _ask(self, question: str) -> SlotSet:
        request = Request(
            messages=[text_message("user", SLOT_PROMPT + question)],
            seed=derive_seed("taec slots", question),
            sampling=Sampling(temperature=0.0, max_tokens=128),
        )
        keywords = parse_slots((await self.client.complete(request)).text, self.limit)
        if not keywords:
            fallback = rule_slots(question, self.limit)
            return replace(fallback, extractor="rules (the model named no slot)", model_calls=1)
        return SlotSet(tuple(keywords), extractor="model", model_calls=1)
