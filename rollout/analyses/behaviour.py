"""VISOR's own tables: completeness and pages, behaviour, windows, and the agreement of two judges."""

from __future__ import annotations

from itertools import combinations

from rollout.analyses.study import Run, Study
from rollout.analyses.table import Cell, Table


def behaviour(study: Study) -> Table | str:
    """VISOR's tables 3, 4 and 8: completeness (over questions with gold pages) and pages a question; rows
    with an invalid action, rows that gave an answer, accuracy; and the window that the run was made with."""
    frame = study.frame
    rows: list[list[Cell]] = []
    for run in study.runs:
        window = run.settings.get("window", "–") if run.system == "visor" else None
        rows.append(
            [
                run.name,
                "all" if window is None and run.system == "visor" else window,
                frame.figure(run.measure(lambda row: row.complete)),
                frame.figure(run.measure(lambda row: len(row.shown_page_ids)), "number"),
                frame.figure(run.measure(lambda row: row.invalid_actions > 0)),
                frame.figure(run.measure(lambda row: row.finished)),
                frame.figure(run.accuracy()),
            ]
        )
    header = ("run", "window", "complete", "pages", "invalid action", "finished", "accuracy")
    return Table("behaviour", "Completeness, pages and behaviour", header, rows)


def judges(study: Study) -> Table | str:
    """VISOR's table 7: two judges on the same answers. Agreement and Cohen's κ are over the answers that both
    runs share word for word and both judges gave a verdict on."""
    rows: list[list[Cell]] = []
    for first, second in combinations(study.runs, 2):
        if first.judge == second.judge:
            continue
        pairs = _verdicts(first, second)
        if not pairs:
            continue
        agree = sum(a == b for a, b in pairs) / len(pairs)
        rates = [sum(verdict) / len(pairs) for verdict in zip(*pairs, strict=True)]
        chance = rates[0] * rates[1] + (1 - rates[0]) * (1 - rates[1])
        kappa = None if chance == 1 else f"{(agree - chance) / (1 - chance):.3f}"
        only = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
        delta = study.frame.difference(first.accuracy(), second.accuracy())
        rows.append(
            [
                f"{first.judge} / {second.judge}",
                f"{first.name} / {second.name}",
                len(pairs),
                f"{100 * agree:.1f}",
                kappa,
                f"{only[0]}/{only[1]}",
                delta,
            ]
        )
    if not rows:
        return "needs runs of the same answers under two judges"
    header = ("judges", "runs", "answers", "agree", "κ", "only 1st/2nd", "Δ accuracy")
    return Table("judges", "Agreement of two judges", header, rows)


def _verdicts(first: Run, second: Run) -> list[tuple[bool, bool]]:
    """Both verdicts on each answer that stands in both runs, by question and sample."""
    found = []
    for rows_1, rows_2 in zip(first.questions, second.questions, strict=True):
        others = {row.sample_index: row for row in rows_2}
        for row in rows_1:
            other = others.get(row.sample_index)
            if other is None or row.answer is None or row.answer != other.answer:
                continue
            if row.verdict is not None and other.verdict is not None:
                found.append((row.verdict, other.verdict))
    return found
