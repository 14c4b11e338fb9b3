"""Paired comparison of runs over the same questions: differences with intervals and exact tests."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from math import comb
from pathlib import Path
from typing import Any

import numpy as np

from rollout.analyses.table import Table
from rollout.metrics import Metrics, headline
from rollout.recorder import read_lines
from rollout.results import ResultRow
from rollout.tables import format_table

RESULTS_NAME = "results.jsonl"
RESAMPLES = 10_000


@dataclass(frozen=True)
class Difference:
    """Second run minus first run on one metric."""

    metric: str
    first: str
    second: str
    n: int
    """Questions that both runs have a value for."""
    difference: float | None
    """None = no question has."""
    low: float | None = None
    high: float | None = None
    """95 % percentile bootstrap over questions."""
    p_value: float | None = None
    """McNemar's exact test; None for a metric that is not right/wrong or with several samples a question."""
    only_first: int | None = None
    only_second: int | None = None
    """Discordant pairs: right in one run only."""


@dataclass
class Comparison:
    runs: dict[str, Metrics]
    """Each run's figures over the common questions."""
    differences: list[Difference]
    common_questions: int
    notes: list[str] = field(default_factory=list)
    """What makes the comparison weaker: questions left out, runs made with another judge or retriever."""
    analyses: list[Table] = field(default_factory=list)
    lacking: dict[str, str] = field(default_factory=dict)
    """Analyses that these runs cannot give, and what each needs."""


def bootstrap_interval(
    differences: Sequence[float], resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """95 % percentile interval of the mean of paired differences, resampling questions.

    `differences`: one a question (n ≥ 1). Seeded, so that a table can be printed again.
    """
    values = np.asarray(differences, dtype=np.float64)
    assert values.ndim == 1
    assert len(values)
    rng = np.random.default_rng(seed)
    means = np.empty(resamples)
    # In slices: resamples × questions indices at once would take gigabytes for a large benchmark.
    size = max(1, 4_000_000 // len(values))
    for start in range(0, resamples, size):
        count = min(size, resamples - start)
        picks = rng.integers(0, len(values), size=(count, len(values)))
        means[start : start + count] = values[picks].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def mcnemar_exact(only_first: int, only_second: int) -> float:
    """Two-sided exact p value: the discordant pairs are fair coin tosses under the null hypothesis."""
    n = only_first + only_second
    if n == 0:
        return 1.0
    tail = sum(comb(n, k) for k in range(min(only_first, only_second) + 1))
    # Both are integers, which Python divides exactly; as floats they would overflow from n = 1024.
    return min(1.0, 2 * tail / 2**n)


def compare(runs: Mapping[str, Sequence[ResultRow]], resamples: int = RESAMPLES, seed: int = 0) -> Comparison:
    """Compare every pair of two or more named runs on the questions that all of them have.

    A question with several samples enters with their mean. ValueError for fewer than two runs, no common
    question or `resamples` < 1.
    """
    if resamples < 1:
        raise ValueError(f"resamples is {resamples}; the bootstrap needs at least 1")
    if len(runs) < 2:
        raise ValueError("a comparison needs at least two runs")
    grouped = {name: by_question(rows) for name, rows in runs.items()}
    common = set.intersection(*(set(questions) for questions in grouped.values()))
    if not common:
        raise ValueError("the runs have no question in common: " + ", ".join(runs))
    order = [question_id for question_id in next(iter(grouped.values())) if question_id in common]
    kept = {name: [questions[q] for q in order] for name, questions in grouped.items()}
    differences = []
    for first, second in combinations(kept, 2):
        pair = (first, second, kept[first], kept[second], resamples, seed)
        differences += [_accuracy_difference(*pair), _reward_difference(*pair)]
    return Comparison(
        runs={name: headline([row for rows in members for row in rows]) for name, members in kept.items()},
        differences=differences,
        common_questions=len(common),
        notes=[
            f"{name}: {len(questions) - len(common)} of {len(questions)} questions are not in every run"
            " and are left out"
            for name, questions in grouped.items()
            if len(questions) > len(common)
        ],
    )


def load_results(folder: str | Path) -> list[ResultRow]:
    """The result rows of a run folder; ValueError when it has none."""
    path = Path(folder) / RESULTS_NAME
    if not path.is_file():
        raise ValueError(f"{folder} holds no {RESULTS_NAME}; give folders that rollout.evaluate wrote")
    rows = [ResultRow.model_validate(record) for record in read_lines(path)]
    if not rows:
        raise ValueError(f"{path} is empty: the run has no result yet")
    return rows


def render(comparison: Comparison, style: str = "text") -> str:
    """The comparison as "text", "markdown" or "json"."""
    if style == "json":
        return json.dumps(_record(comparison), ensure_ascii=False, indent=2, allow_nan=False)
    figures = (
        "n",
        "failed",
        "accuracy",
        "mean_reward",
        "completeness",
        "verification_share",
        "mean_searches",
    )
    runs = [(name, *(metrics[figure] for figure in figures)) for name, metrics in comparison.runs.items()]
    header = (
        "second − first",
        "metric",
        "questions",
        "difference",
        "95 % interval",
        "McNemar p",
        "only 1st/2nd",
    )
    parts = [
        f"{comparison.common_questions} questions in common",
        format_table(("run", *figures), runs, style),
        format_table(header, [_difference_cells(d) for d in comparison.differences], style),
        *(f"note: {note}" for note in comparison.notes),
        *(table.render(style) for table in comparison.analyses),
    ]
    if comparison.lacking:
        lines = [f"{name}: {reason}" for name, reason in comparison.lacking.items()]
        bullet = "- " if style == "markdown" else "  "
        parts.append("Not shown:\n\n" if style == "markdown" else "not shown:\n")
        parts[-1] += "\n".join(bullet + line for line in lines)
    return "\n\n".join(parts)


def _record(comparison: Comparison) -> dict[str, Any]:
    return {
        "runs": comparison.runs,
        "differences": [asdict(difference) for difference in comparison.differences],
        "common_questions": comparison.common_questions,
        "notes": comparison.notes,
        "analyses": [table.record() for table in comparison.analyses],
        "lacking": comparison.lacking,
    }


def by_question(rows: Sequence[ResultRow]) -> dict[str, list[ResultRow]]:
    questions: dict[str, list[ResultRow]] = defaultdict(list)
    for row in rows:
        questions[row.question_id].append(row)
    return questions


Questions = Sequence[Sequence[ResultRow]]
"""For each question, in the same order in both runs, the rows of its samples."""


def _accuracy_difference(
    first: str, second: str, rows_1: Questions, rows_2: Questions, resamples: int, seed: int
) -> Difference:
    right_1, right_2 = ([_mean([row.correct for row in rows]) for rows in run] for run in (rows_1, rows_2))
    deltas = [b - a for a, b in zip(right_1, right_2, strict=True)]
    low, high = bootstrap_interval(deltas, resamples, seed)
    result = Difference("accuracy", first, second, len(deltas), _mean(deltas), low, high)
    if any(len(rows) > 1 for run in (rows_1, rows_2) for rows in run):
        return result
    only_1, only_2 = deltas.count(-1.0), deltas.count(1.0)
    tests = {"p_value": mcnemar_exact(only_1, only_2), "only_first": only_1, "only_second": only_2}
    return Difference(**asdict(result) | tests)


def _reward_difference(
    first: str, second: str, rows_1: Questions, rows_2: Questions, resamples: int, seed: int
) -> Difference:
    """Over the questions that have a scored sample in both runs: unscored is not 0."""
    rewards_1, rewards_2 = (
        [[row.reward for row in rows if row.reward is not None] for rows in run] for run in (rows_1, rows_2)
    )
    deltas = [_mean(b) - _mean(a) for a, b in zip(rewards_1, rewards_2, strict=True) if a and b]
    if not deltas:
        return Difference("reward", first, second, 0, None)
    low, high = bootstrap_interval(deltas, resamples, seed)
    return Difference("reward", first, second, len(deltas), _mean(deltas), low, high)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _difference_cells(d: Difference) -> tuple:
    interval = None if d.low is None else f"[{d.low:+.3f}, {d.high:+.3f}]"
    discordant = None if d.only_first is None else f"{d.only_first}/{d.only_second}"
    change = None if d.difference is None else f"{d.difference:+.3f}"
    p_value = None if d.p_value is None else f"{d.p_value:.4f}"
    return (f"{d.second} − {d.first}", d.metric, d.n, change, interval, p_value, discordant)
