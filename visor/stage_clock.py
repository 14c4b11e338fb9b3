"""Where the time goes: seconds of named stages, added up over a whole process, and what is under way now.

One clock, like a profiler, because the stages are spread over rooms that do not know each other. Reading it
changes nothing of what is timed.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count


@dataclass(frozen=True)
class OpenStage:
    """A block that has not ended."""

    stage: str
    since: float
    """When it began, on the clock."""
    note: str
    """What it works on."""
    thread: str
    """The name of the thread it began in."""


class StageClock:
    """Seconds by stage since the last `take`, and the blocks that are open. Safe to use from several threads.

    `moved` is when a block last began or ended or `progress` was called, and `last_note` what was said then.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.moved = now()
        self.last_note = ""
        self._lock = threading.Lock()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._stacks = threading.local()
        self._waiting: dict[str, tuple[int, float]] = {}
        """Stage → (how many wait, since when at least one does)."""
        self._open: dict[int, OpenStage] = {}
        self._numbers = count()

    @contextmanager
    def running(self, stage: str, note: str = "") -> Iterator[None]:
        """Time the block; for code without `await`. A stage inside another one of the same thread is taken
        out of it, so that no second counts twice there."""
        stack: list[list] = self._stacks.__dict__.setdefault("open", [])
        started = self.now()
        if stack:
            self._add(stack[-1][0], started - stack[-1][1])
        stack.append([stage, started])
        number = self._begin(stage, started, note)
        try:
            yield
        finally:
            ended = self.now()
            _, since = stack.pop()
            self._add(stage, ended - since)
            if stack:
                stack[-1][1] = ended
            self._end(number, ended)

    @contextmanager
    def waiting(self, stage: str, note: str = "") -> Iterator[None]:
        """Time the block; may hold an `await`. The stage counts the time in which at least one such block is
        open, however many there are; it may run beside other stages."""
        with self._lock:
            started = self.now()
            count, since = self._waiting.get(stage, (0, 0.0))
            self._waiting[stage] = (count + 1, since if count else started)
        number = self._begin(stage, started, note)
        try:
            yield
        finally:
            with self._lock:
                ended = self.now()
                count, since = self._waiting.pop(stage)
                if count > 1:
                    self._waiting[stage] = (count - 1, since)
                else:
                    self._seconds[stage] += ended - since
            self._end(number, ended)

    def progress(self, note: str = "") -> None:
        """Say that work goes on, inside a block that may take long, and on what."""
        self._move(self.now(), note)

    def open_stages(self) -> list[OpenStage]:
        """The blocks that are open now, the earliest first."""
        with self._lock:
            return list(self._open.values())

    def take(self) -> dict[str, float]:
        """The seconds so far, and start again. What still waits is counted up to now; what still runs counts
        when it ends."""
        with self._lock:
            now = self.now()
            for stage, (count, since) in self._waiting.items():
                self._seconds[stage] += now - since
                self._waiting[stage] = (count, now)
            taken, self._seconds = dict(self._seconds), defaultdict(float)
            return taken

    def _begin(self, stage: str, now: float, note: str) -> int:
        number = next(self._numbers)
        with self._lock:
            self._open[number] = OpenStage(stage, now, note, threading.current_thread().name)
        self._move(now, note)
        return number

    def _end(self, number: int, now: float) -> None:
        with self._lock:
            del self._open[number]
        self._move(now, "")

    def _move(self, now: float, note: str) -> None:
        self.moved = now
        self.last_note = note or self.last_note

    def _add(self, stage: str, seconds: float) -> None:
        with self._lock:
            self._seconds[stage] += seconds


CLOCK = StageClock()
"""The clock of this process."""
