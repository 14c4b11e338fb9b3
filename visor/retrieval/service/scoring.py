"""One thread that owns the retriever and scores whatever waits, all at once.

Requests that come in while it scores are its next batch; nothing ever waits for a batch to fill. The thread
is a daemon: a retriever that hangs in its library does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from visor.retrieval.base import BatchRetriever, Query, ScoredPage
from visor.retrieval.fingerprint import Fingerprint, check_canaries, take_fingerprint
from visor.retrieval.service.limits import Limits, Refused

Ranked = list[list[ScoredPage]]


@dataclass(frozen=True)
class Opened:
    """A retriever, and the manifest of its index as a mapping."""

    retriever: BatchRetriever
    manifest: dict[str, Any]


@dataclass
class _Job:
    queries: Sequence[Query]
    future: asyncio.Future[Ranked]


@dataclass
class Scorer:
    """Opens a retriever in its own thread, checks it, then answers searches until `stop`."""

    open: Callable[[], Opened]
    """Runs in the scoring thread. A ValueError or OSError ends the thread and is kept in `failure`."""
    limits: Limits = field(default_factory=Limits)
    on_ready: Callable[[], None] = lambda: None
    on_failure: Callable[[], None] = lambda: None

    state: Literal["opening", "ready", "unfit", "failed", "stopped"] = "opening"
    """unfit: the self-check found that the retriever cannot be trusted. failed: it could not be opened."""
    reason: str = "the index is being opened."
    """Why it does not serve, while it does not."""
    failure: BaseException | None = None
    opened: Opened | None = None
    fingerprint: Fingerprint | None = None
    broken: str | None = None
    """What the retriever raised at the latest search; None when that one succeeded."""

    def __post_init__(self) -> None:
        self._jobs: deque[_Job] = deque()
        self._waiting = 0
        self._changed = threading.Condition()
        self._seconds_per_query = 0.0
        self._thread = threading.Thread(target=self._run, name="scoring", daemon=True)

    # ------------------------------------------------------------ the event loop's side

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Take no more searches; those that wait are refused."""
        with self._changed:
            self.state, self.reason = "stopped", "the service is shutting down."
            self._changed.notify()

    async def search(self, queries: Sequence[Query]) -> Ranked:
        """Score queries. Raises Refused: 503 while there is no working retriever, 429 when too many wait.

        Cancelling takes the queries out of the next batch.
        """
        self.check_ready()
        if not queries:
            return []
        job = _Job(queries, asyncio.get_running_loop().create_future())
        with self._changed:
            if self._waiting and self._waiting + len(queries) > self.limits.max_waiting:
                seconds = min(max(1, math.ceil(self._waiting * self._seconds_per_query)), 60)
                raise Refused(
                    429, f"{self._waiting} queries are waiting already; try again in {seconds} s.", seconds
                )
            self._jobs.append(job)
            self._waiting += len(queries)
            self._changed.notify()
        return await job.future

    def check_ready(self) -> None:
        """Raises Refused (503) unless searches can be taken."""
        if self.state != "ready":
            raise Refused(503, self.reason, retry_after=1)

    # ------------------------------------------------------------ the thread's side

    def _run(self) -> None:
        try:
            self._open()
        except BaseException as error:
            if not isinstance(error, ValueError | OSError):
                traceback.print_exc()
            self.failure = error
            self.state, self.reason = "failed", f"the index cannot be opened: {_told(error)}."
            self.on_failure()
            return
        while jobs := self._next_batch():
            _deliver(jobs, self._score(jobs))
        _deliver(self._jobs, [Refused(503, self.reason, retry_after=1) for _ in self._jobs])

    def _open(self) -> None:
        opened = self.open()
        try:
            check_canaries(opened.retriever)
        except ValueError as error:
            self.state, self.reason = "unfit", f"the retriever failed its self-check: {_told(error)}."
            print(f"not serving: {self.reason}", file=sys.stderr, flush=True)
            return
        self.fingerprint = take_fingerprint(opened.retriever, opened.manifest)
        self.opened = opened
        if self.state == "opening":
            self.state, self.reason = "ready", ""
            self.on_ready()

    def _next_batch(self) -> list[_Job]:
        """Whole requests up to `max_batch` queries, at least one; empty once stopped."""
        batch: list[_Job] = []
        size = 0
        with self._changed:
            while not batch and self.state != "stopped":
                if not self._jobs:
                    self._changed.wait()
                while self._jobs and (
                    not batch or size + len(self._jobs[0].queries) <= self.limits.max_batch
                ):
                    job = self._jobs.popleft()
                    self._waiting -= len(job.queries)
                    if not job.future.cancelled():  # else its client has gone
                        batch.append(job)
                        size += len(job.queries)
        return batch

    def _score(self, jobs: list[_Job]) -> list[Ranked | Refused]:
        started = time.perf_counter()
        queries = [query for job in jobs for query in job.queries]
        try:
            ranked = iter(self._search(queries))
            return [[next(ranked) for _ in job.queries] for job in jobs]
        except Exception:
            # One request must not fail for what another one asked: each is tried alone.
            return [self._score_alone(job) for job in jobs]
        finally:
            seconds = (time.perf_counter() - started) / len(queries)
            self._seconds_per_query += 0.2 * (seconds - self._seconds_per_query)

    def _score_alone(self, job: _Job) -> Ranked | Refused:
        try:
            return self._search(job.queries)
        except Exception as error:
            traceback.print_exc()
            self.broken = _told(error)
            return Refused(503, f"the retriever failed: {self.broken}.", retry_after=1)

    def _search(self, queries: Sequence[Query]) -> Ranked:
        """The retriever's pages. A query without text has none, whatever the retriever."""
        assert self.opened is not None
        asked = [query for query in queries if query.text.strip()]
        found = iter(self.opened.retriever.search_batch(asked) if asked else [])
        ranked = [next(found) if query.text.strip() else [] for query in queries]
        self.broken = None
        return ranked


def _deliver(jobs: Iterable[_Job], outcomes: Iterable[Ranked | Refused]) -> None:
    """Hand outcomes over to the event loop that waits for them."""
    for loop, mine in _by_loop(zip(jobs, outcomes)).items():
        with suppress(RuntimeError):  # that loop has ended; nobody waits
            loop.call_soon_threadsafe(_settle, mine)


def _by_loop(
    pairs: Iterable[tuple[_Job, Ranked | Refused]],
) -> dict[asyncio.AbstractEventLoop, list[tuple[_Job, Ranked | Refused]]]:
    found: dict[asyncio.AbstractEventLoop, list[tuple[_Job, Ranked | Refused]]] = {}
    for job, outcome in pairs:
        found.setdefault(job.future.get_loop(), []).append((job, outcome))
    return found


def _settle(pairs: list[tuple[_Job, Ranked | Refused]]) -> None:
    for job, outcome in pairs:
        if job.future.done():
            continue  # its client has gone
        if isinstance(outcome, Refused):
            job.future.set_exception(outcome)
        else:
            job.future.set_result(outcome)


def _told(error: BaseException) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"
