"""Analyses by the number of searches: of the run itself, of a reference run, or at most k."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rollout.analyses.frame import Filter, Value
from rollout.analyses.study import Run, Study
from rollout.analyses.table import Cell, Table
from rollout.results import ResultRow

Bucket = tuple[str, int, int | None]
"""Name, smallest and largest number of searches; None = no largest."""

DEPTH: Sequence[Bucket] = (
    ("1", 1, 1),
    ("2", 2, 2),
    ("3", 3, 3),
    ("4–5", 4, 5),
    ("6–8", 6, 8),
    ("9+", 9, None),
)
DIFFICULTY: Sequence[Bucket] = (("1", 1, 1), ("2–3", 2, 3), ("4–5", 4, 5), ("6+", 6, None))
PRICE: Sequence[Bucket] = (("1", 1, 1), ("2", 2, 2), ("3–4", 3, 4), ("5+", 5, None))
WITHIN = (1, 2, 3, 5, 8, 10, 20)


def within(bucket: Bucket) -> Callable[[ResultRow], bool]:
    """Whether a row's searches are of the bucket."""
    _, low, high = bucket
    return lambda row: low <= row.searches and (high is None or row.searches <= high)


def gold_first(row: ResultRow) -> bool | None:
    """Whether a gold page was among the first five that the first search retrieved; None where unknown."""
    if row.first_retrieved is None or not row.gold_page_ids:
        return None
    return bool(set(row.first_retrieved) & set(row.gold_page_ids))


def depth(study: Study) -> Table | str:
    """Table 2: each run by its own searches. found-unused = a gold page entered the context and the answer is
    wrong. Questions without a search are in none of the rows, those without gold pages count as no hit."""
    rows: list[list[Cell]] = []
    notes = []
    for run in study.runs:
        rows += [row for bucket in DEPTH if (row := _depth_row(study, run, bucket, "all", None))]
        rows += [
            row
            for bucket in DEPTH
            if (row := _depth_row(study, run, bucket, "gold in first five", gold_first))
        ]
        unknown = sum(row.first_retrieved is None for rows_ in run.questions for row in rows_)
        if unknown:
            notes.append(f"{run.name}: {unknown} rows do not tell which pages were retrieved first")
    header = ("run", "questions", "searches", "n", "hit", "post-hit", "accuracy", "found-unused")
    return Table("depth", "Depth: by the run's own number of searches", header, rows, notes)


def _depth_row(study: Study, run: Run, bucket: Bucket, which: str, also: Filter | None) -> list[Cell] | None:
    inside = within(bucket)

    def of(row: ResultRow) -> bool:
        return inside(row) and (also is None or bool(also(row)))

    weight = run.measure(lambda row: 1.0, of).denominator.sum()
    if not weight:
        return None
    figure = study.frame.figure
    return [
        run.name,
        which,
        bucket[0],
        round(weight),
        figure(run.measure(lambda row: bool(row.hit), of)),
        figure(run.accuracy(lambda row: of(row) and row.hit)),
        figure(run.accuracy(of)),
        figure(run.measure(lambda row: bool(row.hit) and not row.correct, of)),
    ]


def difficulty(study: Study) -> Table | str:
    """Table 3: accuracy of every run on the questions of each search count of the reference run."""
    reference = study.reference
    if reference is None:
        return "needs the reference run"
    rows: list[list[Cell]] = []
    for bucket in DIFFICULTY:
        subset = study.subset(reference, within(bucket))
        rows += _against(study, reference, bucket[0], subset)
    title = f"Difficulty: by the searches of {reference.name}"
    return Table("difficulty", title, ("searches", "run", "n", "accuracy", "difference"), rows)


def _against(study: Study, first: Run, label: str, subset: np.ndarray) -> list[list[Cell]]:
    """Accuracy of each run on a subset, and its difference to `first`."""
    if not subset.any():
        return []
    base = first.accuracy().where(subset)
    return [
        [
            label,
            run.name,
            int(subset.sum()),
            study.frame.figure(own := run.accuracy().where(subset)),
            None if run is first else study.frame.difference(base, own),
        ]
        for run in study.runs
    ]


def stopping(study: Study) -> Table | str:
    """Table 13: the reference run against vanilla, where it stopped after one search or searched again."""
    reference, vanilla = study.reference, study.vanilla
    if reference is None or vanilla is None or reference is vanilla:
        return "needs a reference run and a vanilla run"
    rows: list[list[Cell]] = []
    for label, holds in (
        ("stopped after one", lambda row: row.searches == 1),
        ("searched again", lambda row: row.searches > 1),
    ):
        subset = study.subset(reference, holds)
        rows += _pair(study, label, subset, vanilla, reference)
    header = ("reference", "n", reference.name, vanilla.name, "difference")
    return Table("stopping", f"Stopping: {reference.name} against {vanilla.name}", header, rows)


def _pair(study: Study, label: str, subset: np.ndarray, base: Run, other: Run) -> list[list[Cell]]:
    """[label, n, other, base, other − base]; none for an empty subset."""
    if not subset.any():
        return []
    first, second = base.accuracy().where(subset), other.accuracy().where(subset)
    frame = study.frame
    figures = frame.figure(second), frame.figure(first), frame.difference(first, second)
    return [[label, int(subset.sum()), *figures]]


def over_search_price(study: Study) -> Table | str:
    """Table 16: by the searches of a run under the layer, over the questions that vanilla hit."""
    vanilla = study.vanilla
    if vanilla is None or not study.layered:
        return "needs a vanilla run and a run under the TAEC layer"
    hit = study.subset(vanilla, lambda row: row.hit)
    rows: list[list[Cell]] = []
    for run in study.layered:
        for bucket in PRICE:
            subset = hit & study.subset(run, within(bucket))
            found = _pair(study, bucket[0], subset, vanilla, run)
            rows += [[run.name, label, n, base, own, delta] for label, n, own, base, delta in found]
    header = ("run", "searches", "n", "vanilla", "accuracy", "difference")
    return Table("price", f"Price of over-searching: questions that {vanilla.name} hit", header, rows)


def within_k(study: Study) -> Table | str:
    """Table 19: share of all questions answered correctly with at most k searches; nothing is run again."""
    rows: list[list[Cell]] = []
    for run in study.runs:
        for k in WITHIN:
            own, base = (one.measure(_right_within(k)) for one in (run, study.baseline))
            delta = None if run is study.baseline else study.frame.difference(base, own)
            rows.append([run.name, k, study.frame.figure(own), delta])
    header = ("run", "k", "correct", "difference")
    return Table("within-k", "Correct within k searches", header, rows)


def _right_within(k: int) -> Value:
    return lambda row: row.correct and row.searches <= k
