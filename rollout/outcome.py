"""What went wrong in a run, counted by reason, and whether anything of it can be used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rollout.results import ResultRow


def reasons(rows: Iterable[ResultRow]) -> list[str]:
    """One line for each distinct reason of a fault or of a missing verdict, the most frequent first."""
    counts: Counter[str] = Counter()
    for row in rows:
        if row.error:
            counts[f"fault: {_one_line(row.error)}"] += 1
        elif row.unjudged:
            counts[f"unjudged: {_one_line(row.unscored_reason) or 'no verdict'}"] += 1
    return [f"{count} × {reason}" for reason, count in counts.most_common()]


def failure(rows: Sequence[ResultRow]) -> str:
    """Why the figures of these rows say nothing about the system; empty when they do."""
    if all(row.error for row in rows):
        return f"all {len(rows)} rows ended with a fault"
    answers = [row for row in rows if row.finished and not row.error]
    if answers and all(row.unjudged for row in answers):
        return f"none of the {len(answers)} answers got a verdict"
    return ""


def _one_line(text: str) -> str:
    return " ".join(text.split())
