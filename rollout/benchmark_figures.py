"""The figures that a benchmark's own scorer reports, from the rows that it judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rewards.honesty import is_refusal
from rewards.mmlongbench import NOT_ANSWERABLE
from rewards.slidevqa import answer_match, evidence_match
from rollout.results import ResultRow

Figures = dict[str, float | int | None]


def benchmark_figures(rows: Sequence[ResultRow]) -> dict[str, Figures]:
    """For each benchmark scorer among the judges of the rows, its own figures over the rows it judged.

    A row without an answer has no judge's word and scores 0; it counts for the scorer that is the run's.
    """
    judges = {row.judge: row.judge.partition("+")[0] for row in rows}
    return {
        judge: FIGURES[scorer]([row for row in rows if row.judge == judge])
        for judge, scorer in sorted(judges.items())
        if scorer in FIGURES
    }


def mmlongbench_figures(rows: Sequence[ResultRow]) -> Figures:
    """Accuracy and F1 of MMLongBench-Doc.

    accuracy: mean score over all rows. recall: summed score of the answerable rows / answerable rows;
    precision: the same sum / rows whose answer is not "Not answerable"; f1: their harmonic mean. A row
    without an answer scores 0 and counts in all three denominators.
    """
    answerable = [row for row in rows if NOT_ANSWERABLE not in row.gold_answers]
    predicted = [row for row in rows if not is_refusal(row.judged_as or row.answer or "")]
    gained = sum(row.score or 0.0 for row in answerable)
    recall, precision = _ratio(gained, len(answerable)), _ratio(gained, len(predicted))
    return {
        "n": len(rows),
        "accuracy": _ratio(sum(row.score or 0.0 for row in rows), len(rows)),
        "recall": recall,
        "precision": precision,
        "f1": None if recall is None else _harmonic(recall, precision or 0.0),
    }


def slidevqa_figures(rows: Sequence[ResultRow]) -> Figures:
    """Exact match and F1 of SlideVQA: of answers, of evidence pages, and of the two together.

    The predicted evidence is all pages that searches showed. A question without gold pages is not in the
    evidence and joint figures.
    """
    figures: Figures = {
        "n": len(rows),
        "exact_match": _ratio(sum(row.correct for row in rows), len(rows)),
        "f1": _ratio(sum(row.score or 0.0 for row in rows), len(rows)),
    }
    gold = [row for row in rows if row.gold_page_ids]
    evidence = [evidence_match(row.gold_page_ids, row.shown_page_ids) for row in gold]
    joint = [
        max(
            (
                answer_match(row.question, answer, row.judged_as or row.answer or "").joint(pages)
                for answer in row.gold_answers
            ),
            key=lambda match: (match.exact, match.f1),
            default=None,
        )
        for row, pages in zip(gold, evidence, strict=True)
    ]
    for name, matches in (("evidence", evidence), ("joint", joint)):
        figures[f"{name}_exact_match"] = _ratio(sum(bool(m and m.exact) for m in matches), len(gold))
        figures[f"{name}_f1"] = _ratio(sum(m.f1 for m in matches if m), len(gold))
    return figures


FIGURES: dict[str, Callable[[Sequence[ResultRow]], Figures]] = {
    "mmlongbench": mmlongbench_figures,
    "slidevqa": slidevqa_figures,
}
"""By the name of the scorer; a judge with an extraction call has it in its name, before a plus sign."""


def _ratio(numerator: float, denominator: int) -> float | None:
    return numerator / denominator if denominator else None


def _harmonic(one: float, other: float) -> float:
    return 2 * one * other / (one + other) if one + other else 0.0
