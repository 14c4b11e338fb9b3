"""Figures over the questions that all runs share, and their bootstrap over these questions.

A figure is a ratio: what each question adds to its numerator over what it adds to its denominator. So shares
of subsets (of the hits, of a bucket) are resampled with their size. Every figure of a comparison uses the
same resamples, which pairs the runs: an interval of a difference is that of the paired differences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rollout.analyses.table import Figure, Unit
from rollout.results import ResultRow

SLICE_CELLS = 4_000_000
"""Resamples × questions drawn at once."""

Value = Callable[[ResultRow], float | bool | None]
"""What a row is worth."""
Filter = Callable[[ResultRow], bool | None]
"""Which rows a figure is about; false and None = not this one."""


@dataclass(frozen=True)
class Measure:
    """One run's part of a figure."""

    numerator: np.ndarray
    """(questions,)"""
    denominator: np.ndarray
    """(questions,)"""

    def where(self, subset: np.ndarray) -> Measure:
        """The same over a subset of the questions, a (questions,) array of truth values."""
        return Measure(self.numerator * subset, self.denominator * subset)

    @property
    def value(self) -> float | None:
        below = self.denominator.sum()
        return float(self.numerator.sum() / below) if below else None


def measure(questions: Sequence[Sequence[ResultRow]], value: Value, of: Filter | None = None) -> Measure:
    """Mean of `value` over the rows that `of` holds for; each sample of a question weighs 1 / samples.

    `questions`: for each question the rows of its samples. A row whose value is None has no part in it.
    """
    numerator, denominator = np.zeros(len(questions)), np.zeros(len(questions))
    for index, rows in enumerate(questions):
        for row in rows:
            if of is not None and not of(row):
                continue
            worth = value(row)
            if worth is not None:
                numerator[index] += float(worth) / len(rows)
                denominator[index] += 1 / len(rows)
    return Measure(numerator, denominator)


@dataclass
class _Waiting:
    figure: Figure
    first: Measure
    second: Measure | None


class Frame:
    """Makes figures, and gives all of them their intervals in one pass over the resamples."""

    def __init__(self, n: int, resamples: int, seed: int = 0) -> None:
        self.n = n
        self.resamples = resamples
        self.seed = seed
        self._waiting: list[_Waiting] = []

    def figure(self, what: Measure, unit: Unit = "share") -> Figure:
        """The ratio of one run."""
        return self._keep(Figure(what.value, unit), what, None)

    def difference(self, first: Measure, second: Measure, unit: Unit = "points") -> Figure:
        """The second's ratio minus the first's."""
        before, after = first.value, second.value
        value = None if before is None or after is None else after - before
        return self._keep(Figure(value, unit), first, second)

    def _keep(self, figure: Figure, first: Measure, second: Measure | None) -> Figure:
        if figure.value is not None:
            self._waiting.append(_Waiting(figure, first, second))
        return figure

    def resolve(self) -> None:
        """Set the 95 % percentile intervals of all figures made so far.

        Resamples in which a denominator is 0 are left out of its figure.
        """
        waiting, self._waiting = self._waiting, []
        if not waiting or not self.n:
            return
        columns, places = _columns(waiting)
        found = np.empty((self.resamples, len(waiting)), dtype=np.float32)
        rng = np.random.default_rng(self.seed)
        size = max(1, SLICE_CELLS // self.n)
        for start in range(0, self.resamples, size):
            count = min(size, self.resamples - start)
            sums = _weights(rng, count, self.n) @ columns
            for index, (top, below, top_2, below_2) in enumerate(places):
                values = _ratio(sums[:, top], sums[:, below])
                if top_2 >= 0:
                    values = _ratio(sums[:, top_2], sums[:, below_2]) - values
                found[start : start + count, index] = values
        for index, item in enumerate(waiting):
            values = found[:, index]
            values = values[~np.isnan(values)]
            if len(values):
                low, high = np.quantile(values, [0.025, 0.975])
                item.figure.low, item.figure.high = float(low), float(high)


def _columns(waiting: Sequence[_Waiting]) -> tuple[np.ndarray, list[tuple[int, int, int, int]]]:
    """The distinct columns that the figures sum, (questions, columns), and where each figure finds its own:
    numerator and denominator of the first and, −1 without one, of the second measure."""
    known: dict[bytes, int] = {}
    columns: list[np.ndarray] = []

    def place(column: np.ndarray) -> int:
        key = column.tobytes()
        if key not in known:
            known[key] = len(columns)
            columns.append(column)
        return known[key]

    places = []
    for item in waiting:
        first = place(item.first.numerator), place(item.first.denominator)
        second = (place(item.second.numerator), place(item.second.denominator)) if item.second else (-1, -1)
        places.append((*first, *second))
    return np.stack(columns, axis=1), places


def _weights(rng: np.random.Generator, count: int, n: int) -> np.ndarray:
    """How often each question is drawn in each resample, (count, n)."""
    picks = rng.integers(0, n, size=(count, n)) + n * np.arange(count)[:, None]
    return np.bincount(picks.ravel(), minlength=count * n).reshape(count, n).astype(np.float64)


def _ratio(top: np.ndarray, below: np.ndarray) -> np.ndarray:
    # Sums of 1/samples that should be 0 are: they add up zeros.
    return np.divide(top, below, out=np.full_like(top, np.nan), where=below > 0)
