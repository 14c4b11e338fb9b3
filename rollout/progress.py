"""One line that says how far a run is."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rollout.results import ResultRow

LOG_LINES = 10
"""Lines in all when the output is not a terminal."""


class Progress:
    """Counts finished rows; on a terminal the line is rewritten, in a log it is printed now and then."""

    def __init__(self, total: int, done_before: int = 0, stream: TextIO | None = None) -> None:
        self.total = total
        self.done = self.correct = self.failed = 0
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._started = time.perf_counter()
        self._every = max(1, total // LOG_LINES)
        if done_before:
            print(f"{done_before} rows are there already, {total} to go", file=self._stream)

    def update(self, row: ResultRow) -> None:
        """Count one finished row and show the line when it is due."""
        self.done += 1
        self.correct += row.correct
        self.failed += row.failed
        if self._terminal:
            print(f"\r{self.line()}", end="", flush=True, file=self._stream)
        elif self.done % self._every == 0 or self.done == self.total:
            print(self.line(), flush=True, file=self._stream)

    def line(self) -> str:
        rate = self.done / max(time.perf_counter() - self._started, 1e-9)
        share = 100 * self.correct / max(self.done, 1)
        return (
            f"{self.done}/{self.total}  right {self.correct} ({share:.1f} %)  failed {self.failed}"
            f"  {rate:.2f} questions/s"
        )

    def close(self) -> None:
        if self._terminal and self.done:
            print(file=self._stream)
