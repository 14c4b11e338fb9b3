"""Text → index terms, for any script, the same for pages and queries."""

from __future__ import annotations

import re
import unicodedata

TOKENIZER_VERSION = "1"
"""Raise it with any change that alters a token; an index made with another version is refused."""

_UNSPACED = (
    "\u0e00-\u0eff"  # Thai, Lao
    "\u1000-\u109f\u1780-\u17ff"  # Myanmar, Khmer
    "\u1100-\u11ff\uac00-\ud7af"  # Hangul
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # kana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
)
_MARKS = "\u0300-\u036f\u0591-\u05bd\u0610-\u061a\u064b-\u065f\u0670\u0900-\u0903\u093a-\u0963\u0980-\u0dff"
"""Accents and vowel signs that belong to a word although Python's \\w leaves them out."""
_TOKEN = re.compile(
    rf"(?P<unspaced>[{_UNSPACED}]+)"
    r"|(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|\d+(?:\.\d+)+)"
    rf"|(?P<word>(?:(?![{_UNSPACED}_])\w|[{_MARKS}])+)"
)
_FOLD: dict[int, int | str | None] = {}
_FOLD |= {full: full - 0xFEE0 for full in range(0xFF01, 0xFF5F)}  # full-width Latin → ASCII
_FOLD |= dict.fromkeys(map(ord, "⁰¹²³⁴⁵⁶⁷⁸⁹"), " ")  # a footnote mark is no part of the word before it
_FOLD |= {0x00AD: None, 0x200B: None, 0x200C: None, 0x200D: None}  # soft hyphen, zero-width


def tokenize(text: str) -> list[str]:
    """Split into terms: case-folded words, numbers (1,577 → 1577; 12.5 whole), pairs of characters of scripts
    written without spaces. Composed (NFC) first, so that both spellings of an accent are one term."""
    text = unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).translate(_FOLD).casefold())
    terms: list[str] = []
    for match in _TOKEN.finditer(text):
        token = match.group()
        if match.lastgroup == "unspaced" and len(token) > 1:
            terms += [token[i : i + 2] for i in range(len(token) - 1)]
        elif match.lastgroup == "number":
            terms.append(token.replace(",", ""))
        else:
            terms.append(token)
    return terms
