"""Analyses of coverage (did a gold page enter the context) and use (was the answer then right)."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from rollout.analyses.frame import Measure
from rollout.analyses.study import Run, Study
from rollout.analyses.table import Cell, Table
from rollout.results import ResultRow


def found_used(row: ResultRow) -> bool:
    return bool(row.hit) and row.correct


def found_unused(row: ResultRow) -> bool:
    return bool(row.hit) and not row.correct


def missed_right(row: ResultRow) -> bool:
    return row.hit is False and row.correct


def missed_wrong(row: ResultRow) -> bool:
    return row.hit is False and not row.correct


def coverage(study: Study) -> Table | str:
    """Table 5: hit rate and accuracy over all questions, post-hit accuracy over the hits, and accuracy
    over the misses. A question without gold pages is a miss here."""
    frame, base = study.frame, study.baseline
    rows: list[list[Cell]] = [
        [
            run.name,
            frame.n,
            frame.figure(run.measure(lambda row: bool(row.hit))),
            frame.figure(run.accuracy(lambda row: row.hit)),
            frame.figure(run.accuracy(lambda row: not row.hit)),
            frame.figure(run.accuracy()),
            None
            if run is base
            else frame.difference(
                base.measure(lambda row: bool(row.hit)), run.measure(lambda row: bool(row.hit))
            ),
            None if run is base else frame.difference(base.accuracy(), run.accuracy()),
        ]
        for run in study.runs
    ]
    header = ("run", "n", "hit", "post-hit", "on misses", "accuracy", "Δ hit", "Δ accuracy")
    note = "post-hit accuracies of two runs are over different questions and are not to be subtracted"
    return Table("coverage", "Coverage and use", header, rows, [note])


def matched(study: Study) -> Table | str:
    """Table 4: the questions on which the reference run searched more than once; the five shares are over
    those of them that carry a gold page."""
    reference = study.reference
    if reference is None:
        return "needs the reference run"
    subset = study.subset(reference, lambda row: row.searches > 1)
    if not subset.any():
        return f"{reference.name} never searched more than once"
    frame = study.frame
    gold = subset & study.subset(reference, lambda row: row.gold_page_ids)
    rows: list[list[Cell]] = []
    for run in study.runs:
        shares = [
            frame.figure(run.measure(part).where(gold))
            for part in (lambda row: row.hit, found_used, found_unused, missed_right, missed_wrong)
        ]
        searches = frame.figure(run.measure(lambda row: row.searches).where(subset), "number")
        delta = (
            None
            if run is reference
            else frame.difference(reference.accuracy().where(subset), run.accuracy().where(subset))
        )
        rows.append([run.name, int(subset.sum()), int(gold.sum()), searches, *shares, delta])
    header = (
        "run",
        "n",
        "with gold",
        "searches",
        "coverage",
        "found-used",
        "found-unused",
        "missed-right",
        "missed-wrong",
        "Δ accuracy",
    )
    return Table("matched", f"Matched subset: {reference.name} searched more than once", header, rows)


GROUPS = ("both", "only first", "only second", "neither")
Part = tuple[Fraction, Fraction, Fraction]
"""What a question adds to a group: its weight, and the right answers of the first and of the second run."""


def group_parts(first: Run, second: Run) -> dict[str, list[Part]]:
    """Figure 9 in exact numbers: for each group the part of each question, in order.

    A question without gold pages has none. With several samples every pair of a sample of the one and one of
    the other weighs 1 / pairs, so that the sums stay those of the mean over samples.
    """
    nothing: Part = (Fraction(0), Fraction(0), Fraction(0))
    parts = {group: [nothing] * len(first.questions) for group in GROUPS}
    for index, (rows_1, rows_2) in enumerate(zip(first.questions, second.questions, strict=True)):
        if not rows_1[0].gold_page_ids:
            continue
        weight = Fraction(1, len(rows_1) * len(rows_2))
        for row_1 in rows_1:
            for row_2 in rows_2:
                group = _group(bool(row_1.hit), bool(row_2.hit))
                n, right_1, right_2 = parts[group][index]
                right_1, right_2 = right_1 + weight * row_1.correct, right_2 + weight * row_2.correct
                parts[group][index] = (n + weight, right_1, right_2)
    return parts


def contributions(first: Run, second: Run) -> dict[str, Fraction]:
    """n/N · (accuracy of second − accuracy of first) of each group; they sum exactly to the difference of the
    two accuracies over the N questions with gold pages."""
    parts = group_parts(first, second)
    total = sum(n for members in parts.values() for n, _, _ in members)
    return {
        group: sum((right_2 - right_1 for _, right_1, right_2 in members), Fraction(0)) / (total or 1)
        for group, members in parts.items()
    }


def _group(first: bool, second: bool) -> str:
    if first and second:
        return "both"
    if first or second:
        return "only first" if first else "only second"
    return "neither"


def four_groups(study: Study) -> Table | str:
    """Figure 9: questions hit by both runs, by one alone, by neither, and what each group contributes to the
    difference in accuracy: n/N · (accuracy of second − accuracy of first)."""
    first = study.baseline
    if len(study.runs) < 2:
        return "needs two runs"
    if not any(rows[0].gold_page_ids for rows in first.questions):
        return "needs questions with gold pages"
    rows: list[list[Cell]] = []
    for second in study.runs[1:]:
        arrays = {
            group: np.array([[float(value) for value in part] for part in members]).T
            for group, members in group_parts(first, second).items()
        }
        arrays["all"] = np.sum(list(arrays.values()), axis=0)
        with_gold = arrays["all"][0]
        for group, (n, right_1, right_2) in arrays.items():
            figures = (
                study.frame.figure(Measure(right_1, n)),
                study.frame.figure(Measure(right_2, n)),
                study.frame.figure(Measure(right_2 - right_1, with_gold), "points"),
            )
            rows.append([second.name, group, round(n.sum()), *figures])
    header = ("second", "hit by", "n", "first", "second's", "contribution")
    title = f"Four groups: {first.name} (first) and each other run (second), questions with gold pages"
    return Table("groups", title, header, rows)


def no_search(study: Study) -> Table | str:
    """Share of all questions that were answered without any search."""
    frame, base = study.frame, study.baseline

    def unsearched(row: ResultRow) -> bool:
        return row.finished and not row.searches

    rows: list[list[Cell]] = [
        [
            run.name,
            frame.n,
            frame.figure(run.measure(unsearched)),
            None if run is base else frame.difference(base.measure(unsearched), run.measure(unsearched)),
        ]
        for run in study.runs
    ]
    return Table("no-search", "Answered without a search", ("run", "n", "share", "difference"), rows)


def distinct_pages(study: Study) -> Table | str:
    """Pages that searches put into the context a question, and the share of them that are distinct."""
    frame = study.frame

    def admitted(row: ResultRow) -> int:
        return sum(map(len, row.admitted_pages))

    rows: list[list[Cell]] = []
    for run in study.runs:
        pages, shown = run.measure(admitted), run.measure(lambda row: len(row.shown_page_ids))
        share = Measure(shown.numerator, pages.numerator)
        figures = frame.figure(pages, "number"), frame.figure(shown, "number"), frame.figure(share)
        rows.append([run.name, *figures])
    header = ("run", "admitted a question", "distinct a question", "distinct share")
    return Table("distinct", "Distinct pages", header, rows)


def abilities(study: Study) -> Table | str:
    """Table 14, a row a run. reads: accuracy on questions with one search and a hit. commits without gold:
    share of all questions answered after one search without a hit. over-searches: share of the questions
    whose gold page one vanilla retrieval reached on which the run searched again."""
    frame, vanilla = study.frame, study.vanilla
    reached = study.subset(vanilla, lambda row: row.hit) if vanilla else None
    rows: list[list[Cell]] = []
    for run in study.runs:
        again = run.measure(lambda row: row.searches > 1)
        rows.append(
            [
                run.name,
                run.model or None,
                frame.figure(run.accuracy(lambda row: row.searches == 1 and row.hit)),
                frame.figure(run.measure(lambda row: row.finished and row.searches == 1 and not row.hit)),
                None if reached is None or run is vanilla else frame.figure(again.where(reached)),
                frame.figure(run.measure(lambda row: row.searches), "number"),
            ]
        )
    header = ("run", "model", "reads", "commits without gold", "over-searches", "searches")
    notes = [] if vanilla else ["over-searches needs a vanilla run"]
    return Table("abilities", "Abilities of the acting model", header, rows, notes)
