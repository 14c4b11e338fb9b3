"""Context pressure: neutral text in front of every prompt, everything else as it is (TAEC, table 12).

The text goes to the model and not into the record: contexts of the trajectory, what a layer counts, and the
pixels of pictures are those of the run without it. So two runs that differ in it differ in nothing else the
environment does.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path

from visor.env.tokens import estimate_tokens
from visor.models.base import PolicyClient, Request, takes_tools
from visor.types import Completion, Message, TextPart

NEUTRAL_FILE = Path(__file__).with_name("neutral.txt")
BYTES_PER_TOKEN = 4
"""Of `estimate_tokens`; the text is plain ASCII."""


@cache
def neutral_text(tokens: int) -> str:
    """Everyday sentences that hold no fact, name or number, over and over: `tokens` tokens by the rule of
    thumb of four bytes each, the last sentence cut where they end. ValueError for fewer than one."""
    if tokens < 1:
        raise ValueError(f"pressure_tokens is {tokens}; name 1 or more, or 0 for none")
    sentences = NEUTRAL_FILE.read_text(encoding="ascii").splitlines()
    needed, parts = tokens * BYTES_PER_TOKEN, []
    for sentence in cycle(sentences):
        parts.append(sentence + " ")
        needed -= len(parts[-1])
        if needed <= 0:
            break
    text = "".join(parts)[: tokens * BYTES_PER_TOKEN]
    assert estimate_tokens(text) == tokens
    return text


def neutral_digest(tokens: int) -> str:
    """SHA-256 of the text, 16 hex digits: what a run records beside its length."""
    return hashlib.sha256(neutral_text(tokens).encode()).hexdigest()[:16]


class PressuredClient:
    """A policy client whose every prompt has the neutral text before its first user message."""

    def __init__(self, client: PolicyClient, tokens: int) -> None:
        self.name = client.name
        self.takes_tools = takes_tools(client)
        self._client = client
        self._text = neutral_text(tokens) + "\n\n"

    async def complete(self, request: Request) -> Completion:
        return await self._client.complete(replace(request, messages=self._with_text(request.messages)))

    def _with_text(self, messages: list[Message]) -> list[Message]:
        first = next((i for i, message in enumerate(messages) if message.role == "user"), None)
        assert first is not None, "a prompt asks something"
        asked = messages[first]
        longer = asked.model_copy(update={"content": [TextPart(text=self._text), *asked.content]})
        return [*messages[:first], longer, *messages[first + 1 :]]
