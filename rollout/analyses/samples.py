"""Several samples a question: mean and pass@k."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import comb

import numpy as np

from rollout.analyses.frame import Measure
from rollout.analyses.study import Run, Study
from rollout.analyses.table import Cell, Table
from rollout.results import ResultRow


def pass_at_k(n: int, right: int, k: int) -> float:
    """Chance that at least one of k samples, drawn without replacement from n of which `right` are right, is.

    The unbiased estimator of pass@k (Chen et al. 2021, "Evaluating Large Language Models Trained on Code",
    section 2.1):

        pass@k = 1 − C(n − right, k) / C(n, k)

    with C(a, k) = 0 for a < k. Requires 1 ≤ k ≤ n; exact integers, so that no product overflows.
    """
    if not 1 <= k <= n or not 0 <= right <= n:
        raise ValueError(f"pass@{k} of {right} right among {n} samples is not defined")
    return 1 - comb(n - right, k) / comb(n, k)


def sample_counts(least: int) -> list[int]:
    """The k of the figures for `least` samples a question: 1, 2, 4, … and `least`."""
    powers = [1 << power for power in range(least.bit_length()) if 1 << power <= least]
    return sorted({*powers, least})


def mean_pass_at_k(rows: Sequence[ResultRow], k: int) -> float | None:
    """`pass_at_k`, mean over questions, of which each has its samples among the rows; None without rows.
    ValueError when a question has fewer than k."""
    by_question: dict[str, list[bool]] = defaultdict(list)
    for row in rows:
        by_question[row.question_id].append(bool(row.correct))
    values = [pass_at_k(len(right), sum(right), k) for right in by_question.values()]
    return sum(values) / len(values) if values else None


def samples(study: Study) -> Table | str:
    """Mean accuracy and pass@k, means over questions with intervals over questions; k = 1, 2, 4, … up to the
    smallest number of samples that a question has."""
    rows: list[list[Cell]] = []
    for run in study.runs:
        counts = [len(members) for members in run.questions]
        least, most = min(counts), max(counts)
        if most == 1:
            continue
        taken = str(least) if least == most else f"{least}–{most}"
        for k in sample_counts(least):
            rows.append([run.name, taken, f"pass@{k}", study.frame.figure(_pass(run, k))])
        rows.append([run.name, taken, "mean", study.frame.figure(run.accuracy())])
    if not rows:
        return "needs runs with several samples a question"
    return Table("samples", "Several samples a question", ("run", "samples", "figure", "value"), rows)


def _pass(run: Run, k: int) -> Measure:
    values = [pass_at_k(len(rows), sum(row.correct for row in rows), k) for rows in run.questions]
    return Measure(np.array(values), np.ones(len(values)))
