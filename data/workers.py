"""A pool of worker processes that survives what is done in them.

PDFium is not thread-safe, so work is spread over processes, each with one thread and one task at a time. A
task that kills its worker is tried once more in a new one (it may have been the victim of a full memory); one
that takes too long is ended. Both are failures of that task alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

TASKS_PER_WORKER = 500
"""A worker is replaced after this many tasks, which bounds what the libraries in it hold on to."""
DEFAULT_TIME_LIMIT = 600.0
"""Seconds that one task may take."""
START_LIMIT = 120.0
"""Seconds that a new process has until it says that it is ready."""
READ_BYTES = 1 << 20


class Task(Protocol):
    """Something for a worker to do; hashable."""

    @property
    def name(self) -> str:
        """For messages to the user."""
        ...

    def request(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Outcome:
    """What became of a task: a value, or an error in words and of which kind."""

    value: Any = None
    error: str = ""
    kind: Literal["", "document", "disk", "engine"] = ""


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class WorkerPool:
    """Runs tasks in up to `workers` processes. A process starts when there is a task for it."""

    def __init__(
        self,
        workers: int,
        time_limit: float = DEFAULT_TIME_LIMIT,
        command: list[str] | None = None,
        keep: tuple[int, ...] = (),
    ) -> None:
        """`keep`: descriptors that the processes hold open as long as they run, such as a lock."""
        self.size = workers
        self._keep = keep
        self.time_limit = time_limit
        self._command = command or worker_command()
        self._workers: list[_Worker] = []
        self._again: list[Task] = []
        self._tried: set[Task] = set()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, error_type: object, *_: object) -> None:
        for worker in self._workers:
            worker.end(at_once=error_type is not None or worker.task is not None)
        self._workers = []

    def run(self, next_task: Callable[[], Task | None]) -> Iterator[tuple[Task, Outcome]]:
        """Yield each task with its outcome, in the order in which they end.

        `next_task` is asked whenever a worker is free, and again after each outcome that was None before; so
        outcomes may bring new tasks. It ends when there is none and nothing runs. Raises RuntimeError when
        worker processes cannot be started.
        """
        while True:
            self._hand_out(next_task)
            busy = [worker for worker in self._workers if worker.task is not None]
            if not busy:
                return
            for worker in _wait(busy):
                task, outcome = worker.task, self._outcome(worker)
                if outcome is not None:
                    assert task is not None
                    yield task, outcome

    def _hand_out(self, next_task: Callable[[], Task | None]) -> None:
        while True:
            idle = next((worker for worker in self._workers if worker.task is None), None)
            if idle is None and len(self._workers) >= self.size:
                return
            task = self._again.pop() if self._again else next_task()
            if task is None:
                return
            if idle is None:
                idle = _Worker(self._command, self._keep)
                self._workers.append(idle)
            idle.give(task, self.time_limit)

    def _outcome(self, worker: _Worker) -> Outcome | None:
        """The outcome of a worker's task; None while there is none, and when the task is tried again."""
        task = worker.task
        assert task is not None
        reply = worker.receive()
        if reply is not None:
            if reply.get("ready"):
                worker.deadline = time.monotonic() + self.time_limit
                return None
            worker.task = None
            if worker.done >= TASKS_PER_WORKER:
                self._drop(worker, at_once=False)
            return Outcome(**reply)
        if worker.alive and time.monotonic() < worker.deadline:
            return None  # part of a long reply
        late = worker.alive
        self._drop(worker, at_once=True)
        if not worker.ready:
            raise RuntimeError(f"a worker process does not start: {worker.last_words()}")
        if late:
            return Outcome(error=f"{task.name}: took longer than {self.time_limit:g} s", kind="document")
        if task not in self._tried:
            self._tried.add(task)
            self._again.append(task)
            return None
        how = worker.cause_of_death()
        return Outcome(error=f"{task.name}: crashed the process that worked on it ({how})", kind="document")

    def _drop(self, worker: _Worker, at_once: bool) -> None:
        self._workers.remove(worker)
        worker.end(at_once)


def worker_command() -> list[str]:
    """Command line of a worker that finds modules where this process does."""
    code = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import data.worker_process as worker"
    return [sys.executable, "-c", f"{code}; worker.main()", json.dumps(sys.path)]


@dataclass(eq=False)
class _Worker:
    """One process and what it is doing."""

    command: list[str]
    keep: tuple[int, ...] = ()
    task: Task | None = None
    deadline: float = 0.0
    ready: bool = False
    """It said that it has started."""
    alive: bool = True
    done: int = 0
    """Tasks given to it."""
    _received: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process runs
        # One thread each: as many processes as cores would otherwise start that many threads each.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            bufsize=0,
            pass_fds=self.keep,
        )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)

    def give(self, task: Task, time_limit: float) -> None:
        assert self.process.stdin is not None
        self.task = task
        self.deadline = time.monotonic() + (time_limit if self.ready else START_LIMIT)
        self.done += 1
        with contextlib.suppress(BrokenPipeError):  # it has died; the end of its output says so
            self.process.stdin.write(json.dumps(task.request()).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """A reply, or None when none is complete."""
        assert self.process.stdout is not None
        if not self.has_reply and self.alive:
            try:
                data = os.read(self.process.stdout.fileno(), READ_BYTES)
            except BlockingIOError:
                return None
            self.alive = bool(data)
            self._received += data
        line, newline, rest = self._received.partition(b"\n")
        if not newline:
            return None
        self._received = rest
        reply = json.loads(line)
        self.ready = self.ready or "ready" in reply
        return reply

    @property
    def has_reply(self) -> bool:
        return b"\n" in self._received

    def end(self, at_once: bool) -> None:
        """Let the process end by itself, or kill it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if at_once:
            self.process.kill()
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def cause_of_death(self) -> str:
        code = self.process.returncode
        if code is not None and code < 0:
            return signal.Signals(-code).name
        return f"exit code {code}"

    def last_words(self) -> str:
        """The end of what it wrote to standard error."""
        self._errors.seek(0)
        text = self._errors.read().decode("utf-8", "replace").strip()
        return text[-2000:] or self.cause_of_death()


def _wait(busy: list[_Worker]) -> list[_Worker]:
    """Wait for the first workers that have something to say, have died or are late."""
    waiting = [worker for worker in busy if worker.has_reply]
    if waiting:
        return waiting
    with selectors.DefaultSelector() as selector:
        for worker in busy:
            assert worker.process.stdout is not None
            selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
        left = min(worker.deadline for worker in busy) - time.monotonic()
        told = [key.data for key, _ in selector.select(max(0.0, left))]
    now = time.monotonic()
    return told + [worker for worker in busy if worker.deadline <= now and worker not in told]
