"""Texts of a known number of tokens, and a stand-in for a tokenizer that is not at hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from visor.models.rendering import IM_END, IM_START, ChatRenderer
from visor.models.tiny import SPECIAL_TOKENS

CHARACTERS_A_TOKEN = 4
"""Of the stand-in. The shipped prompts take 4.2 in Qwen2.5's vocabulary, tags and page ids 2 to 3."""
WORDS = (" the", " a", " page", " x", "the", "a", "x", ".")
TRIED = 64
"""Repetitions a word must survive as one token each to be a filler."""


def stand_in_tokenizer():
    """A tokenizer that takes CHARACTERS_A_TOKEN characters for a token and has Qwen's special tokens."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unknown>": 0}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    pieces = Regex(rf"[\s\S]{{1,{CHARACTERS_A_TOKEN}}}")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pieces, behavior="isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        additional_special_tokens=[token for token in SPECIAL_TOKENS if token not in (IM_END, IM_START)]
        + [IM_START],
    )


def counting_renderer(tokenizer, vision_config: Any) -> ChatRenderer:
    """A renderer that counts tokens and image tokens; it cannot make pixels."""
    sizes = SimpleNamespace(merge_size=vision_config.spatial_merge_size, patch_size=vision_config.patch_size)
    return ChatRenderer(tokenizer, sizes)


class Filler:
    """Makes texts of n tokens out of one word that stays one token however often it is repeated."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self.word = next(word for word in self._candidates() if self._count(word * TRIED) == TRIED)

    def _candidates(self):
        yield from WORDS
        tokenizer = self._renderer.tokenizer
        yield "a" * CHARACTERS_A_TOKEN
        for token_id in range(len(tokenizer)):
            if token_id not in self._renderer.special_ids:
                yield tokenizer.decode([token_id])

    def _count(self, text: str) -> int:
        return len(self._renderer.text_ids(text))

    def text(self, tokens: int, before: str = "", after: str = "") -> str:
        """`before` + filler + `after`, as many words of filler as keep it within `tokens`; "" when `before`
        and `after` alone are over it."""
        count = tokens - self._count(before + after)
        while count >= 0:
            text = before + self.word * count + after
            over = self._count(text) - tokens
            if over <= 0:
                return text
            count -= over
        return ""
