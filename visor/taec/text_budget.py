"""The text budget of the exposed context: ctx(E_t) ≤ L_t (TAEC, eq. 1)."""

from __future__ import annotations

from collections.abc import Sequence


def fit(forms: Sequence[Sequence[int]], budget: int) -> list[int]:
    """Which form of each observation is shown, so that all of them take at most `budget` tokens.

    `forms[m]` are the tokens of observation m in each of its forms, the fullest first; the last one leaves it
    out and takes 0. Observations stand oldest first, which is the order of their persistence (eq. 3) where
    all are of one granularity. Each pass goes one form down with each, the oldest first, until all fit.

    The paper names the budget and does not say how it is kept; the order is ours.
    """
    assert all(sizes[-1] == 0 for sizes in forms), "an observation can always be left out"
    chosen = [0] * len(forms)
    total = sum(sizes[0] for sizes in forms)
    for level in range(1, max(map(len, forms), default=0)):
        for index, sizes in enumerate(forms):
            if total <= budget:
                return chosen
            if level < len(sizes):
                total += sizes[level] - sizes[level - 1]
                chosen[index] = level
    return chosen
