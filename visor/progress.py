"""How far a count is, for people."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

LOG_LINES = 10
"""Where the output is no terminal."""


class ProgressLines:
    """Shows (done, total): a bar on a terminal, about ten lines in a log; silent with nothing to do.

    In its `with` block it is the function to call.
    """

    def __init__(self, unit: str):
        self._unit = unit
        self._bar: Any = None
        self._shown = 0

    def __enter__(self) -> Callable[[int, int], None]:
        return self._update

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def _update(self, done: int, total: int) -> None:
        if sys.stderr.isatty():
            if self._bar is None:
                from tqdm import tqdm

                self._bar = tqdm(total=total, unit=f" {self._unit}", file=sys.stderr)
            self._bar.update(done - self._bar.n)
        elif done == total or done * LOG_LINES // total > self._shown:
            self._shown = done * LOG_LINES // total
            print(f"{done}/{total} {self._unit}", file=sys.stderr, flush=True)
