"""The study's targets, held against its tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.study_stats import PairedDifference, SeedMean
from scripts.study_text import Table


@dataclass(frozen=True)
class Target:
    """A figure and its bound, sampled and greedy both."""

    table: str
    row: str
    """With {decoding} in it."""
    column: str
    bound: float
    value: Callable[[Any], float | None] = lambda cell: cell.mean
    what: str = ""
    at_most: bool = False


def _difference(cell: PairedDifference) -> float | None:
    return cell.difference


def _low(cell: PairedDifference) -> float | None:
    return cell.low


SFT, GAIN = "sft-{decoding}", "grpo-{decoding} − sft-{decoding}"
TARGETS = (
    Target("1. Single-hop", SFT, "accuracy, complete", 0.72),
    Target("1. Single-hop", SFT, "invalid actions", 0.03, at_most=True),
    Target("4. Pages read exactly, single-hop", SFT, "read exactly", 0.97),
    Target("2. GRPO − SFT", GAIN, "Δ=1", 0.55, _difference),
    Target("2. GRPO − SFT", GAIN, "reward", 0.35, _difference),
    Target("2. GRPO − SFT", GAIN, "accuracy, complete", 0.0, _difference, "mean"),
    Target("2. GRPO − SFT", GAIN, "accuracy, complete", -0.01, _low, "lower end"),
    Target("2. GRPO − SFT", GAIN, "read exactly", -0.02, _difference),
    Target(
        "3. Difference to the fixed policy",
        "grpo-{decoding} − always two searches",
        "reward",
        0.0,
        _low,
        "lower end",
    ),
)


def target_table(tables: Sequence[Table]) -> Table:
    """A row for each target and decoding whose figure is there."""
    by_name = {table.name: table for table in tables}
    rows = []
    for target in TARGETS:
        for decoding in ("sampled", "greedy"):
            row = target.row.format(decoding=decoding)
            cell = _cell(by_name.get(target.table), row, target.column)
            value = target.value(cell) if cell is not None else None
            if value is None:
                continue
            met = value <= target.bound if target.at_most else value >= target.bound
            column = f"{target.column}, {target.what}" if target.what else target.column
            bound = f"{'≤' if target.at_most else '≥'} {target.bound:g}"
            rows.append((row, column, float(value), bound, "yes" if met else "no"))
    caption = "Means over seeds, or paired differences and the lower ends of their intervals."
    return Table("0. Targets", caption, ("row", "figure", "value", "target", "met"), rows)


def _cell(table: Table | None, row: str, column: str) -> SeedMean | PairedDifference | None:
    if table is None:
        return None
    rows = [cells for cells in table.rows if cells[0] == row]
    return rows[0][table.header.index(column)] if rows else None
