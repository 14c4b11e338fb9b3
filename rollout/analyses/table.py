"""What an analysis returns: a table of figures with intervals, for the terminal, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rollout.tables import format_table

Unit = Literal["share", "points", "number", "change"]
"""share: 0 to 1, printed in percent. points: a difference of shares. number: as it is. change: a
difference of numbers."""


@dataclass
class Figure:
    """A value with its 95 % interval; None = nothing to divide by."""

    value: float | None
    unit: Unit = "share"
    low: float | None = None
    high: float | None = None

    def text(self) -> str:
        if self.value is None:
            return "–"
        scale = 100.0 if self.unit in ("share", "points") else 1.0
        digits = 1 if scale > 1 else 2
        sign = "+" if self.unit in ("points", "change") else ""

        def shown(value: float) -> str:
            text = f"{value * scale:{sign}.{digits}f}"
            # A difference that rounds to nothing has no sign.
            return text if text.strip("+-0.") else f"{0:.{digits}f}"

        if self.low is None or self.high is None:
            return shown(self.value)
        return f"{shown(self.value)} [{shown(self.low)}, {shown(self.high)}]"


Cell = str | int | Figure | None


@dataclass
class Table:
    """One analysis."""

    name: str
    """For `--only`."""
    title: str
    header: Sequence[str]
    rows: list[list[Cell]]
    notes: list[str] = field(default_factory=list)

    def render(self, style: str) -> str:
        """As "text" or "markdown"; shares in percent."""
        cells = [[cell.text() if isinstance(cell, Figure) else cell for cell in row] for row in self.rows]
        heading = f"### {self.title}" if style == "markdown" else self.title
        parts = [heading, format_table(self.header, cells, style), *(f"note: {note}" for note in self.notes)]
        return "\n\n".join(parts) if style == "markdown" else "\n".join(parts)

    def record(self) -> dict[str, Any]:
        """For JSON: each row by the names of the columns; shares are 0 to 1."""
        rows = [dict(zip(self.header, map(_plain, row), strict=True)) for row in self.rows]
        return {"name": self.name, "title": self.title, "rows": rows, "notes": list(self.notes)}


def _plain(cell: Cell) -> Any:
    if not isinstance(cell, Figure):
        return cell
    return {"value": cell.value, "low": cell.low, "high": cell.high, "unit": cell.unit}
