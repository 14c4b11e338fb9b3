"""How the layer reads captions, questions and queries: normal form, tokens, slot matching."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

# Han, kana and hangul write without spaces between words: each character is a token of its own.
CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003134f"
# The same for text of ASCII alone, several times as fast; it comes case folded.
_ASCII_TOKEN = re.compile(r"\d+(?:[.,]\d+)*|[a-z]+")
_TOKEN = re.compile(rf"[{CJK}]|\d+(?:[.,]\d+)*|(?:(?![{CJK}])[^\W\d_])+")


@lru_cache(maxsize=8192)
def normalise(text: str) -> str:
    """Compatibility form (full-width becomes half-width), case folded, runs of white space made one space."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


@lru_cache(maxsize=8192)
def tokens(text: str) -> frozenset[str]:
    """The set of CJK characters, words and numbers of a text (TAEC, appendix A.3).

    Cached by text: a page's token set is made once, whatever number of episodes meet the page.
    """
    normal = normalise(text)
    return frozenset((_ASCII_TOKEN if normal.isascii() else _TOKEN).findall(normal))


def jaccard(left: frozenset[str], right: frozenset[str]) -> float:
    """Shared tokens over all tokens, in [0, 1]; 0 when both sets are empty."""
    shared = len(left & right)
    union = len(left) + len(right) - shared
    return shared / union if union else 0.0


def occurs(slot: str, text: str) -> bool:
    """Whether a slot keyword is a substring of the text, both in normal form (TAEC, appendix A.3)."""
    return normalise(slot) in normalise(text)
