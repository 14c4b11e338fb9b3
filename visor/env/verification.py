"""Is a search a verification search? (VISOR appendix C, verification hint.)"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from visor.env.phrases import GuardedPhrases


@cache
def _phrases() -> GuardedPhrases:
    return GuardedPhrases.load(Path(__file__).with_name("verification.yaml"))


def is_verification(think: str) -> bool:
    """True when the thought before a search says that the answer is ready to be confirmed.

    Decided by the phrases of `verification.yaml`, English and Chinese; a negated one ("cannot confirm",
    "no need to verify it") does not count.
    """
    return _phrases().match(think)
