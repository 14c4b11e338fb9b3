"""Lines found on a page → text in the order in which a person reads it: columns one after the other.

Lines of the same height form rows. Rows that one vertical white stripe runs through form a block; where the
lines on both sides of the stripe are long enough to be running text, the block is read column by column, and
each column in the same way again. Else it is read row by row, as a table is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

MIN_STRIPE = 0.008
"""Least width of a stripe between columns, as a share of the block's width."""
MIN_COLUMN_LINES = 3
MIN_LINE_WIDTH = 0.2
"""Least median width of a column's lines, as a share of the block's width; cells of a table are shorter."""
MIN_FILL = 0.75
"""Least median width of a side's rows, as a share of the side's; running text fills it."""


@dataclass(frozen=True)
class Line:
    """A line of text and its upright box, pixels."""

    left: float
    top: float
    right: float
    bottom: float
    text: str

    @property
    def height(self) -> float:
        return self.bottom - self.top

    @property
    def centre(self) -> float:
        return (self.top + self.bottom) / 2


Row = list[Line]
Stripe = tuple[float, float]
"""(left, right) of a vertical stripe without text."""


def reading_text(lines: Sequence[Line]) -> str:
    """The page's text, a row a line; words hyphenated over a line end are joined, vertical text is last."""
    upright = [line for line in lines if not _is_vertical(line, lines)]
    vertical = [line for line in lines if _is_vertical(line, lines)]
    texts = [*_read(upright), *(line.text for line in vertical)]
    return re.sub(r"(?<=[^\W\d_])-\n(?=[^\W\d_A-Z])", "", "\n".join(texts))


def _is_vertical(line: Line, lines: Sequence[Line]) -> bool:
    usual = median(other.height for other in lines)
    return line.height > 3 * usual and line.height > 2 * (line.right - line.left)


def _read(lines: Sequence[Line]) -> list[str]:
    rows = rows_of(lines)
    texts: list[str] = []
    start = 0
    while start < len(rows):
        end, columns = _block(rows, start)
        if columns is None:
            texts.append(" ".join(line.text for line in rows[start]))
            start += 1
        else:
            for column in columns:
                texts += _read(column)
            start = end
    return texts


def rows_of(lines: Sequence[Line]) -> list[Row]:
    """Lines side by side, rows from top to bottom, each from left to right."""
    rows: list[Row] = []
    for line in sorted(lines, key=lambda line: (line.centre, line.left)):
        if rows:
            centre = sum(other.centre for other in rows[-1]) / len(rows[-1])
            height = min(line.height, *(other.height for other in rows[-1]))
            if line.centre - centre < height / 2:
                rows[-1].append(line)
                continue
        rows.append([line])
    return [sorted(row, key=lambda line: line.left) for row in rows]


def _block(rows: list[Row], start: int) -> tuple[int, tuple[Row, Row] | None]:
    """The rows from `start` that are text in two columns: where they end, and the columns, else None."""
    left = min(line.left for row in rows[start:] for line in row)
    right = max(line.right for row in rows[start:] for line in row)
    stripes: list[Stripe] = [(left, right)]
    for index in range(start, len(rows)):
        stripes = _cut(stripes, rows[index], MIN_STRIPE * (right - left))
        if not stripes:
            break
        for stripe in stripes:
            middle = sum(stripe) / 2
            if _columns(rows[start : index + 1], middle, right - left):
                # As far down as the stripe goes: the first rows of a table may look like text.
                crossed = (i for i in range(index, len(rows)) if any(_crosses(x, middle) for x in rows[i]))
                end = next(crossed, len(rows))
                return end, _columns(rows[start:end], middle, right - left)
    return start, None


def _columns(rows: list[Row], x: float, width: float) -> tuple[Row, Row] | None:
    """The lines on both sides of `x`, if each side is running text."""
    before = [[line for line in row if line.left < x] for row in rows]
    after = [[line for line in row if line.left >= x] for row in rows]
    if _is_text(before, width) and _is_text(after, width):
        return [line for row in before for line in row], [line for row in after for line in row]
    return None


def _crosses(line: Line, x: float) -> bool:
    return line.left < x < line.right


def _is_text(rows: list[Row], width: float) -> bool:
    """Whether one side of a stripe is running text, in one column or several."""
    rows = [row for row in rows if row]
    if len(rows) < MIN_COLUMN_LINES:
        return False
    lines = [line for row in rows for line in row]
    extent = max(line.right for line in lines) - min(line.left for line in lines)
    fill = median(row[-1].right - row[0].left for row in rows)
    return median(line.right - line.left for line in lines) >= MIN_LINE_WIDTH * width and (
        fill >= MIN_FILL * extent
    )


def _cut(stripes: list[Stripe], row: Row, least: float) -> list[Stripe]:
    """What a row's lines leave of the stripes, those narrower than `least` dropped."""
    for line in row:
        stripes = [
            part
            for left, right in stripes
            for part in ((left, min(right, line.left)), (max(left, line.right), right))
            if part[1] - part[0] >= least
        ]
    return stripes
