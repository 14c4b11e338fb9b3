"""Metrics of a run, from its result rows. Every question stays in the denominator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rollout.benchmark_figures import benchmark_figures
from rollout.results import ResultRow, result_row
from visor.types import Question, Trajectory

MAX_TAG_VALUES = 30
"""A tag with more values than this is an identifier, not a class, and gets no table."""

Metrics = dict[str, Any]

SHARES = (
    "accuracy",
    "accuracy_not_failed",
    "accuracy_when_complete",
    "completeness",
    "hit_rate",
    "no_verification_share",
    "verification_share",
    "over_search_share",
    "invalid_action_rate",
    "finish_rate",
    "no_search_share",
    "box_usage",
)
"""The metrics that are shares, 0 to 1."""


def compute_metrics(trajectories: Iterable[Trajectory], questions: Iterable[Question]) -> Metrics:
    """`summarise` for scored trajectories; their questions are looked up by id."""
    by_id = {question.question_id: question for question in questions}
    return summarise([result_row(t, by_id[t.question_id]) for t in trajectories])


def summarise(rows: Sequence[ResultRow]) -> Metrics:
    """All metrics of the rows, and the main ones by tag. A figure with an empty denominator is None.

    See `headline` for the definitions; `judges` counts the rows of each judge, and `benchmark` holds the
    figures of a benchmark's own scorer where that was the judge.
    """
    metrics = headline(rows)
    metrics["judges"] = dict(Counter(row.judge for row in rows if row.judge).most_common())
    metrics["benchmark"] = benchmark_figures(rows)
    metrics["stop_reasons"] = dict(Counter(row.stop_reason or "none" for row in rows).most_common())
    metrics["seconds"] = _mean_seconds(rows)
    metrics["by_tag"] = {
        tag: {value: headline(members) for value, members in sorted(classes.items())}
        for tag, classes in _classes(rows).items()
    }
    return metrics


def headline(rows: Sequence[ResultRow]) -> Metrics:
    """The figures of one set of rows.

    - n: rows, one a question and sample; questions: distinct questions.
    - failed: rows with a fault or without any answer; faults: rows with an error record; unjudged: answers
      without a verdict; unscored: rows without a reward.
    - accuracy: rows judged right / n, failed and unjudged rows being wrong. accuracy_not_failed leaves the
      failed rows out of the denominator and is never the headline. accuracy_when_complete: among the rows
      whose gold pages were all shown.
    - completeness: rows whose gold pages were all shown / rows with gold pages (VISOR table 3).
      hit_rate: the same with at least one gold page.
    - no_verification_share, verification_share, over_search_share: Δ = 0, Δ = 1, Δ ≥ 2 of VISOR eq. 5
      among the rows with gold pages (an incomplete one has no Δ and is in none of the three).
    - invalid_action_rate: rows with at least one invalid action / n; finish_rate: rows with a non-empty
      answer / n (VISOR table 4); box_usage: rows with at least one crop / n; no_search_share: rows that
      never searched / n.
    - mean_reward: over the rows with a reward. mean_score_when_judged: over the rows that a judge gave a
      score, never the headline. mean_searches, mean_pages (distinct pages shown), mean_calls: per row.
      mean_context_images: images in the context, mean over policy calls; max_context_images: its peak.
    """
    gold = [row for row in rows if row.gold_page_ids]
    images = [count for row in rows for count in row.context_images]
    rewards = [row.reward for row in rows if row.reward is not None]
    return {
        "n": len(rows),
        "questions": len({row.question_id for row in rows}),
        "n_gold": len(gold),
        "failed": sum(row.failed for row in rows),
        "faults": sum(bool(row.error) for row in rows),
        "unjudged": sum(row.unjudged for row in rows),
        "unscored": len(rows) - len(rewards),
        "accuracy": _share(rows, lambda row: row.correct),
        "accuracy_not_failed": _share([row for row in rows if not row.failed], lambda row: row.correct),
        "accuracy_when_complete": _share([row for row in gold if row.complete], lambda row: row.correct),
        "completeness": _share(gold, lambda row: row.complete),
        "hit_rate": _share(gold, lambda row: row.hit),
        "no_verification_share": _share(gold, lambda row: row.delta == 0),
        "verification_share": _share(gold, lambda row: row.delta == 1),
        "over_search_share": _share(gold, lambda row: row.delta is not None and row.delta >= 2),
        "invalid_action_rate": _share(rows, lambda row: row.invalid_actions > 0),
        "finish_rate": _share(rows, lambda row: row.finished),
        "no_search_share": _share(rows, lambda row: not row.queries),
        "box_usage": _share(rows, lambda row: row.crops > 0),
        "mean_reward": _mean(rewards),
        "mean_score_when_judged": _mean([row.score for row in rows if row.score is not None]),
        "mean_searches": _mean([len(row.queries) for row in rows]),
        "mean_pages": _mean([len(row.shown_page_ids) for row in rows]),
        "mean_calls": _mean([row.calls for row in rows]),
        "mean_context_images": _mean(images),
        "max_context_images": max(images, default=None),
    }


def _share(rows: Sequence[ResultRow], holds: Callable[[ResultRow], Any]) -> float | None:
    return _mean([bool(holds(row)) for row in rows])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _mean_seconds(rows: Sequence[ResultRow]) -> dict[str, float]:
    """Mean seconds a row of each stage; a row without the stage counts 0."""
    stages = sorted({stage for row in rows for stage in row.seconds})
    return {stage: sum(row.seconds.get(stage, 0.0) for row in rows) / len(rows) for stage in stages}


def _classes(rows: Sequence[ResultRow]) -> dict[str, dict[str, list[ResultRow]]]:
    """Rows by tag and value; a row whose tag is a list belongs to each of its values.

    A tag whose name begins with "_" is data of the question (its document, its answer's parts), not a class.
    """
    tags: dict[str, dict[str, list[ResultRow]]] = {}
    for row in rows:
        for tag, value in row.tags.items():
            if tag.startswith("_"):
                continue
            for member in dict.fromkeys(map(str, value if isinstance(value, list) else [value])):
                tags.setdefault(tag, {}).setdefault(member, []).append(row)
    return {tag: classes for tag, classes in sorted(tags.items()) if 1 < len(classes) <= MAX_TAG_VALUES}
