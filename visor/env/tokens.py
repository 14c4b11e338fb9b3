"""How long a text is to a model, without its tokenizer."""

from __future__ import annotations

import math


def estimate_tokens(text: str) -> int:
    """Tokens by a rule of thumb, four UTF-8 bytes each: four letters, or 1.3 CJK characters."""
    return math.ceil(len(text.encode("utf-8", "replace")) / 4)
