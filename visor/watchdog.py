"""Ends a run that hangs, and says where: a silent hang costs a night, a sentence costs nothing.

The stage clock knows which stages are open and when one of them last began, ended or told of progress. When
nothing has moved for the time allowed, the open stages are named on stderr with what was done last and the
stack of every thread, and the process ends at once: its main thread may be stuck where no exception reaches.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NoReturn

from visor.stage_clock import CLOCK, OpenStage, StageClock

STATUS = 4
"""Exit status of a run that the watchdog ended."""
CHECKS = 20
"""Looks at the clock within one timeout."""
LONGEST_PAUSE = 5.0
"""Seconds between two looks, at most."""
NOTES_SHOWN = 3


class Watchdog:
    """Watches the process while its `with` block runs.

    `timeout`: seconds without progress after which a stage hangs; `limits` gives single stages more.
    `whole` are stages that contain others, named only when none of those is open. `shared` are stages that
    wait for the other processes of the run: while only such stages are open, or none, the process hangs only
    when `others_hang`, told the seconds, says that the others do too (None: there are no others).
    `details` gives further lines for the report, `beat` is called at every look, with what is open.
    """

    def __init__(
        self,
        timeout: float,
        *,
        name: str = "",
        limits: Mapping[str, float] | None = None,
        whole: Collection[str] = (),
        shared: Collection[str] = (),
        others_hang: Callable[[float], bool] | None = None,
        beat: Callable[[float], None] | None = None,
        details: Sequence[Callable[[], str]] = (),
        advice: Callable[[], str] = lambda: "",
        end: Callable[[str], None] | None = None,
        clock: StageClock = CLOCK,
    ) -> None:
        self.timeout = timeout
        self.name = name
        self.limits = dict(limits or {})
        self.whole = frozenset(whole)
        self.shared = frozenset(shared)
        self.others_hang = others_hang
        self.beat = beat
        self.details = details
        self.advice = advice
        self.end = end or end_process
        self.clock = clock
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        self.clock.progress("the run begins")
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def report(self) -> str | None:
        """What to say when the process hangs; None while it does not."""
        still = self.clock.now() - self.clock.moved
        open_stages = self.clock.open_stages()
        limit = max([self.timeout, *(self.limits.get(each.stage, 0.0) for each in open_stages)])
        if still <= limit:
            return None
        alone = any(each.stage not in self.shared for each in open_stages)
        if not alone and self.others_hang is not None and not self.others_hang(limit):
            return None
        return self._words(open_stages, still, limit)

    def _watch(self) -> None:
        while not self._stop.wait(min(self.timeout / CHECKS, LONGEST_PAUSE)):
            if self.beat is not None:
                self.beat(self.clock.now() - self.clock.moved)
            words = self.report()
            if words is not None and not self._stop.is_set():
                self.end(words)
                return

    def _words(self, open_stages: list[OpenStage], still: float, limit: float) -> str:
        parts = [each for each in open_stages if each.stage not in self.whole] or open_stages
        stages = list(dict.fromkeys(each.stage for each in parts))
        which = f"stage {' and '.join(stages)}" if stages else "no stage is open, and the process"
        lines = [
            f"watchdog: {self.name + ': ' if self.name else ''}{which} has shown no progress for "
            f"{still:,.1f} s (stage_timeout {limit:,g})"
        ]
        now = self.clock.now()
        for stage in stages:
            blocks = [each for each in parts if each.stage == stage]
            notes = [each.note for each in blocks if each.note]
            more = f" and {len(notes) - NOTES_SHOWN} more" if len(notes) > NOTES_SHOWN else ""
            on = f", on {'; '.join(notes[:NOTES_SHOWN])}{more}" if notes else ""
            lines.append(
                f"  {stage}: open for {now - blocks[0].since:,.1f} s in thread {blocks[0].thread}{on}"
            )
        if self.clock.last_note:
            lines.append(f"  last: {self.clock.last_note}")
        lines += [f"  {line}" for detail in self.details if (line := detail())]
        advice = self.advice()
        return "\n".join([*lines, *([f"  {advice}"] if advice else [])])


def end_process(words: str) -> NoReturn:
    """Print the words and the stack of every thread on stderr and end the process with `STATUS`, without
    waiting for anything; processes it started through multiprocessing are ended too."""
    stream = sys.__stderr__ or sys.stderr
    print(words, file=stream, flush=True)
    print("threads:", file=stream, flush=True)
    faulthandler.dump_traceback(file=stream, all_threads=True)
    sys.stdout.flush()
    stream.flush()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(STATUS)
