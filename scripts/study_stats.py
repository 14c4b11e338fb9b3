"""Means over seeds, and paired differences with intervals, of a study whose seeds share their questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scripts.slide_metrics import Episode
from scripts.slide_reading import correct_and_complete

RESAMPLES = 10_000
SLICE = 1_000
"""Resamples drawn at once: a matrix of this many rows and a column a question."""

Key = tuple[int, str]
"""Seed and question id: what two runs are paired by."""
Ratio = tuple[float, float]
"""Numerator and denominator that one episode adds to a figure; (0, 0) = it has no part in it."""
Measure = Callable[[Episode], Ratio]


@dataclass(frozen=True)
class SeedMean:
    """A figure's mean over the seeds that have it."""

    mean: float | None
    by_seed: dict[int, float | None]


@dataclass(frozen=True)
class PairedDifference:
    """Second minus first, over the pairs (seed, question) that both have."""

    difference: float | None
    low: float | None
    high: float | None
    """95 % percentile bootstrap over questions; a question drawn brings its pairs of all seeds, since the
    seeds answer the same questions. It speaks of these trained policies: the spread between seeds is in
    `by_seed`."""
    questions: int
    pairs: int
    by_seed: dict[int, float | None]


def _reward(episode: Episode) -> Ratio:
    return (0.0, 0.0) if episode.row.reward is None else (episode.row.reward, 1.0)


def _read(episode: Episode) -> Ratio:
    return float(sum(reply.exact for reply in episode.replies)), float(len(episode.replies))


MEASURES: dict[str, Measure] = {
    "accuracy": lambda e: (float(e.row.correct), 1.0),
    "accuracy, complete": lambda e: (float(correct_and_complete(e.row)), 1.0),
    "Δ=1": lambda e: (float(e.row.delta == 1), 1.0),
    "reward": _reward,
    "read exactly": _read,
}


def seed_mean(by_seed: Mapping[int, float | None]) -> SeedMean:
    values = [value for value in by_seed.values() if value is not None]
    return SeedMean(sum(values) / len(values) if values else None, dict(by_seed))


def measured(runs: Mapping[int, Sequence[Episode]], measure: Measure) -> dict[Key, Ratio]:
    """A measure of every episode of the runs, which are given by seed.

    ValueError for a run with several samples of a question: pairs would be ambiguous.
    """
    values: dict[Key, Ratio] = {}
    for seed, episodes in runs.items():
        for episode in episodes:
            key = (seed, episode.row.question_id)
            if key in values:
                raise ValueError(f"seed {seed} has more than one sample of question {key[1]!r}")
            values[key] = measure(episode)
    return values


def paired_difference(
    first: Mapping[Key, Ratio], second: Mapping[Key, Ratio], resamples: int = RESAMPLES, seed: int = 0
) -> PairedDifference:
    """Difference of the two pooled ratios (sum of numerators / sum of denominators), paired.

    With denominators of 1 and the same questions in each seed this is the mean over seeds of the mean
    difference. Seeded, so that a table can be printed again.
    """
    keys = [key for key in first if key in second]
    sums = {key: (*first[key], *second[key]) for key in keys}
    by_seed = {
        s: _difference(np.sum([sums[key] for key in keys if key[0] == s], axis=0))
        for s in sorted({key[0] for key in keys})
    }
    clusters: dict[str, np.ndarray] = {}
    for key in keys:
        clusters[key[1]] = clusters.get(key[1], 0) + np.asarray(sums[key], dtype=np.float64)
    if not clusters:
        return PairedDifference(None, None, None, 0, 0, by_seed)
    table = np.stack(list(clusters.values()))  # (questions, 4): numerator, denominator of first and second
    difference = _difference(table.sum(axis=0))
    low, high = _interval(table, resamples, seed)
    return PairedDifference(difference, low, high, len(table), len(keys), by_seed)


def _difference(sums: Sequence[float]) -> float | None:
    top_1, below_1, top_2, below_2 = map(float, sums)
    return top_2 / below_2 - top_1 / below_1 if below_1 and below_2 else None


def _interval(table: np.ndarray, resamples: int, seed: int) -> tuple[float | None, float | None]:
    rng = np.random.default_rng(seed)
    n, found = len(table), []
    for start in range(0, resamples, SLICE):
        weights = rng.multinomial(n, np.full(n, 1 / n), size=min(SLICE, resamples - start))
        top_1, below_1, top_2, below_2 = (weights @ table).T
        usable = (below_1 > 0) & (below_2 > 0)
        found.append(top_2[usable] / below_2[usable] - top_1[usable] / below_1[usable])
    values = np.concatenate(found)
    if not len(values):
        return None, None
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)
