"""Shows how far an ingest is: a bar on a terminal, about ten lines in a log."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, TextIO

from data.ingest_report import Progress

LINES = 10
"""Of a stage, when the output is no terminal."""
TITLES = {"unpack": "slides taken out", "render": "pages rendered", "read": "pages read by OCR"}


class ProgressBar:
    """Give it to `ingest` as `progress`; leave its `with` block when the ingest has ended."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: Any = None
        self._stage = ""
        self._printed = 0
        self._started = time.monotonic()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, progress: Progress) -> None:
        if progress.stage != self._stage:
            self._start(progress.stage)
        if self._stream.isatty():
            self._draw(progress)
        else:
            self._print(progress)

    def _start(self, stage: str) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar, self._stage, self._printed, self._started = None, stage, 0, time.monotonic()

    def _draw(self, progress: Progress) -> None:
        from tqdm import tqdm

        if self._bar is None:
            self._bar = tqdm(
                total=progress.pages,
                desc=TITLES[progress.stage],
                unit="page",
                file=self._stream,
                dynamic_ncols=True,
            )
        self._bar.total = max(progress.pages, progress.pages_done)
        self._bar.set_postfix_str(
            f"{progress.documents_done}/{progress.documents} documents, {progress.doc_id[-30:]}",
            refresh=False,
        )
        self._bar.update(progress.pages_done - self._bar.n)

    def _print(self, progress: Progress) -> None:
        """One line for each tenth of the pages; the end of the stage always has one."""
        tenth = LINES * progress.pages_done // max(progress.pages, 1)
        ended = progress.documents_done == progress.documents
        if not ended and tenth <= self._printed:
            return
        self._printed = max(tenth, self._printed)
        seconds = time.monotonic() - self._started
        left = seconds / max(progress.pages_done, 1) * max(progress.pages - progress.pages_done, 0)
        print(
            f"{TITLES[progress.stage]}: {progress.pages_done} of {progress.pages}, "
            f"documents {progress.documents_done} of {progress.documents}, {progress.doc_id}; "
            f"{seconds:.0f} s, about {left:.0f} s left",
            file=self._stream,
            flush=True,
        )
