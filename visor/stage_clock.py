"""Where the time goes: seconds of named stages, added up over a whole process.

One clock, like a profiler, because the stages are spread over rooms that do not know each other. Reading it
changes nothing of what is timed.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StageClock:
    """Seconds by stage since the last `take`. Safe to use from several threads."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._stacks = threading.local()
        self._waiting: dict[str, tuple[int, float]] = {}
        """Stage → (how many wait, since when at least one does)."""

    @contextmanager
    def running(self, stage: str) -> Iterator[None]:
        """Time the block; for code without `await`. A stage inside another one of the same thread is taken
        out of it, so that no second counts twice there."""
        stack: list[list] = self._stacks.__dict__.setdefault("open", [])
        started = self._now()
        if stack:
            self._add(stack[-1][0], started - stack[-1][1])
        stack.append([stage, started])
        try:
            yield
        finally:
            ended = self._now()
            _, since = stack.pop()
            self._add(stage, ended - since)
            if stack:
                stack[-1][1] = ended

    @contextmanager
    def waiting(self, stage: str) -> Iterator[None]:
        """Time the block; may hold an `await`. The stage counts the time in which at least one such block is
        open, however many there are; it may run beside other stages."""
        with self._lock:
            count, since = self._waiting.get(stage, (0, 0.0))
            self._waiting[stage] = (count + 1, since if count else self._now())
        try:
            yield
        finally:
            with self._lock:
                count, since = self._waiting.pop(stage)
                if count > 1:
                    self._waiting[stage] = (count - 1, since)
                else:
                    self._seconds[stage] += self._now() - since

    def take(self) -> dict[str, float]:
        """The seconds so far, and start again. What still waits is counted up to now; what still runs counts
        when it ends."""
        with self._lock:
            now = self._now()
            for stage, (count, since) in self._waiting.items():
                self._seconds[stage] += now - since
                self._waiting[stage] = (count, now)
            taken, self._seconds = dict(self._seconds), defaultdict(float)
            return taken

    def _add(self, stage: str, seconds: float) -> None:
        with self._lock:
            self._seconds[stage] += seconds


CLOCK = StageClock()
"""The clock of this process."""
