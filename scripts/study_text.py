"""A table of the study, as Markdown and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rollout.tables import format_table
from scripts.study_stats import PairedDifference, SeedMean


@dataclass(frozen=True)
class Table:
    name: str
    caption: str
    header: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    """Texts, numbers, `SeedMean`s and `PairedDifference`s."""


BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def replace_marked(document: str, text: str) -> str:
    """The document with its part between the two markers replaced; ValueError when it lacks them."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the document has no part between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{text.strip()}\n\n{END}{after}"


def render(table: Table) -> str:
    """Markdown. A mean stands with its range over seeds, a difference with its interval."""
    rows = [tuple(cell_text(cell) for cell in row) for row in table.rows]
    return f"### {table.name}\n\n{table.caption}\n\n{format_table(table.header, rows, 'markdown')}"


def cell_text(cell: Any) -> str:
    match cell:
        case SeedMean(mean=None) | PairedDifference(difference=None) | None:
            return "–"
        case SeedMean():
            known = sorted(value for value in cell.by_seed.values() if value is not None)
            if all(isinstance(value, int) for value in known):
                return str(known[0]) if known[0] == known[-1] else f"{known[0]}–{known[-1]}"
            ends = [_short(known[0]), _short(known[-1])]
            return _short(cell.mean) + (f" ({'–'.join(ends)})" if ends[0] != ends[1] else "")
        case PairedDifference():
            low, high = (_short(bound, "+") for bound in (cell.low, cell.high))
            return f"{_short(cell.difference, '+')} [{low}, {high}]"
    return _short(cell) if isinstance(cell, float) else str(cell)


def _short(value: float, sign: str = "") -> str:
    """Three decimals, no zero before the point (".912", "+.55", "-.353"); two from 10 on."""
    text = f"{value:{sign}.3f}" if abs(value) < 10 else f"{value:{sign}.1f}"
    return text.replace("0.", ".", 1) if abs(value) < 1 else text


def as_json(table: Table) -> dict[str, Any]:
    rows = [
        {
            column: asdict(cell) if isinstance(cell, SeedMean | PairedDifference) else cell
            for column, cell in zip(table.header, row, strict=True)
        }
        for row in table.rows
    ]
    return {"caption": table.caption, "rows": rows}
