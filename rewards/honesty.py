"""Does an answer say that the information is missing? (VISOR eq. 4, the honesty check.)"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from visor.env.phrases import GuardedPhrases


@cache
def _phrases() -> GuardedPhrases:
    return GuardedPhrases.load(Path(__file__).with_name("refusals.yaml"))


def is_refusal(answer: str) -> bool:
    """True when the answer admits that the information was not found, and does not guess all the same.

    Decided by the phrases of `refusals.yaml`, English and Chinese. "The page is not found guilty" or "not
    stated, so it is 5" is no admission. An empty answer admits nothing.
    """
    return _phrases().match(answer)
