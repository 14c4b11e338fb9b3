"""Append-only JSON-lines files that survive a kill: one write a row, a torn last line is cut off."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import BaseModel

Key = tuple
KeyOf = Callable[[dict[str, Any]], Key]


def sample_key(record: dict[str, Any]) -> Key:
    """The identity of a trajectory or result row: question id and sample index."""
    return record["question_id"], record.get("sample_index", 0)


def read_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSON-lines file; a torn last line is left out, the file is not changed.

    Raises ValueError naming the file and the line for any other line that is not a JSON object.
    """
    for _, record in numbered_lines(path):
        yield record


def numbered_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """`read_lines` with the number of each line, from 1."""
    for number, _, record in _scan(Path(path)):
        yield number, record


class Recorder:
    """Appends records to a JSON-lines file, each key once.

    Opening it takes what is there: complete rows are kept and their keys are in `done`, a half-written
    last line is cut off, so that its question is run again. Only one process may hold a file open.
    """

    def __init__(self, path: str | Path, key: KeyOf = sample_key, sync_every: int = 1) -> None:
        """`sync_every`: rows between two fsyncs, which run in the background; 0: none before the end. A row
        is written at once, so that the process may be killed at any moment; with 1, a machine that goes down
        loses the rows of the last moments at most, whose questions are then asked again.

        Raises ValueError for a damaged line that is not the last one, for a record without the key's fields
        or a key that stands there twice, and when another process has the file open.
        """
        self.path = Path(path)
        self.key = key
        self.sync_every = sync_every
        self.done: set[Key] = set()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab")  # noqa: SIM115 - closed by close()
        try:
            self._lock()
            self._recover()
        except BaseException:
            self._file.close()
            raise
        self._written = self._synced = 0
        """Rows of this recorder in the file, and on the disk."""
        self._failure: OSError | None = None
        self._thread: ThreadPoolExecutor | None = None

    def append(self, record: BaseModel | dict[str, Any]) -> None:
        """Write one row. ValueError when its key has a row already; OSError when the disk takes no more,
        also for an earlier row that could not be synced."""
        data = record.model_dump(mode="json") if isinstance(record, BaseModel) else record
        key = self.key(data)
        if key in self.done:
            raise ValueError(f"{self.path} already has a row for {key}")
        if self._failure is not None:
            raise self._failure
        self._file.write(_line(data))
        self._file.flush()
        self._written += 1
        if self.sync_every and self._written % self.sync_every == 0:
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="sync")
            self._thread.submit(self._sync_row, self._written)
        self.done.add(key)

    def _sync_row(self, number: int) -> None:
        """Sync up to a row at least, unless that has been done: in the background, since a disk takes
        milliseconds in which the caller has others to serve. Rows that wait share one fsync."""
        if number <= self._synced:
            return
        written = self._written
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self._failure = error
        else:
            self._synced = written

    def close(self) -> None:
        """Wait until all rows are on the disk, and close the file. OSError when they cannot be synced."""
        if self._file.closed:
            return
        try:
            if self._thread is not None:
                self._thread.shutdown()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{self.path} is being written by another process; wait for it") from error

    def _recover(self) -> None:
        """Collect the keys, and cut the file after its last complete row."""
        end = 0
        for _, offset, record in _scan(self.path):
            try:
                key, end = self.key(record), offset
            except KeyError as error:
                raise ValueError(
                    f"{self.path} holds other records: one has no {error}; take another file"
                ) from error
            if key in self.done:
                raise ValueError(f"{self.path} has two rows for {key}; remove one of them")
            self.done.add(key)
        self._file.truncate(end)
        if end and not _ends_with_newline(self.path):
            self._file.write(b"\n")
            self._file.flush()


def rewrite(path: str | Path, records: Iterable[dict[str, Any]]) -> None:
    """Replace a JSON-lines file as a whole: written beside it, synced, renamed."""
    path = Path(path)
    beside = path.with_name(path.name + ".tmp")
    with open(beside, "wb") as file:
        for record in records:
            file.write(_line(record))
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def _scan(path: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield (line number, offset of the byte after the row, record) for each complete row."""
    end = 0
    damaged: int | None = None
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if damaged is not None:
                raise ValueError(f"{path}, line {damaged}: not a JSON object; repair or remove the line")
            record = _parse(line) if line.strip() else {}
            if record is None:
                if not line.startswith(b"{"):  # no half-written row, so cutting it would lose someone's text
                    raise ValueError(f"{path}, line {number}: not a JSON object; take another file")
                damaged = number
                continue
            end += len(line)
            if record:
                yield number, end, record


def _line(record: dict[str, Any]) -> bytes:
    """One row. A lone surrogate, which has no UTF-8 form, is written as its JSON escape and reads back."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode("utf-8", "backslashreplace")


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def mend(path: str | Path) -> None:
    """Cut a torn last line off. ValueError for what `Recorder` refuses, another writer included."""
    Recorder(path).close()
