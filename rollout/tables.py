"""Plain tables for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.metrics import SHARES, Metrics

COUNTS = ("n", "questions", "failed", "faults", "unjudged", "unscored")
MEANS = (
    "mean_reward",
    "mean_score_when_judged",
    "mean_searches",
    "mean_pages",
    "mean_calls",
    "mean_context_images",
    "max_context_images",
)


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]], style: str = "text") -> str:
    """Align columns; `style` is "text" or "markdown". None is printed as a dash."""
    cells = [[_cell(value) for value in row] for row in (header, *rows)]
    if style == "markdown":
        cells = [[cell.replace("|", "\\|") for cell in row] for row in cells]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    left, middle, right = ("| ", " | ", " |") if style == "markdown" else ("", "  ", "")
    lines = [
        left + middle.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + right
        for row in cells
    ]
    lines.insert(1, left + middle.join("-" * width for width in widths) + right)
    return "\n".join(line.rstrip() for line in lines)


def metrics_table(metrics: Metrics, style: str = "text") -> str:
    """The figures of a run, and a line for each class of each tag."""
    names = [name for name in (*COUNTS, *SHARES, *MEANS) if name in metrics]
    parts = [format_table(("metric", "value"), [(name, metrics[name]) for name in names], style)]
    for judge, figures in metrics.get("benchmark", {}).items():
        parts.append(format_table((f"as {judge} scores", "value"), list(figures.items()), style))
    columns = ("n", "accuracy", "completeness", "verification_share", "finish_rate", "mean_searches")
    for tag, classes in metrics.get("by_tag", {}).items():
        rows = [(value, *(figures[column] for column in columns)) for value, figures in classes.items()]
        parts.append(format_table((tag, *columns), rows, style))
    return "\n\n".join(parts)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else str(value).replace("\n", " ")
