"""The format penalty (VISOR section 3.3)."""

from __future__ import annotations


def format_penalty(searches: int) -> int:
    """I_format: 1 when the trajectory has no search, else 0.

    An answer ends its episode, so no search at all and no search before the answer are the same. Defects of
    single replies (`Turn.format_ok`) do not count here, nor does a missing answer.
    """
    return int(searches == 0)
