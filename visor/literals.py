"""Lists that are written as text, as benchmarks and answers write them."""

from __future__ import annotations

import ast
from typing import Any


def list_literal(text: str) -> list[Any] | None:
    """The list that a text such as "['a', 2]" writes, read as a literal; nothing is evaluated. None for any
    other text."""
    if not text.startswith("["):
        return None
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return value if isinstance(value, list) else None
