"""What models said of answers, on disk: verdicts and short answers. The same is never paid for twice."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict, ValidationError


class CachedVerdict(BaseModel):
    """One line of the file: what was asked of whom, and the verdict or, of an extraction, the reply. Texts
    are kept for a reader's sake; the key alone counts."""

    model_config = ConfigDict(extra="ignore")

    key: str
    judge: str
    prompt: str
    """SHA-256 of the prompt's two texts."""
    question: str
    reference: list[str]
    answer: str
    value: bool | None
    """None = an extraction, whose short answer is read from `raw`; the rules that score it are not kept."""
    raw: str
    """The reply that was read."""
    score: float | None = None
    """The grade, where the judge gives grades."""


def cache_key(judge: str, prompt: str, question: str, reference: Sequence[str], answer: str) -> str:
    """SHA-256 of the five; a list, so that no two of them can run into one another."""
    text = json.dumps([judge, prompt, question, list(reference), answer])
    return hashlib.sha256(text.encode()).hexdigest()


class JudgeCache:
    """A JSON-lines file of verdicts that several processes and threads may use at once.

    A line is appended under a lock and flushed to the disk. A half-written last line, of a process that was
    killed, is cut off by the next writer and until then not read; other lines that cannot be read are skipped
    and counted in `damaged`. Only verdicts are kept: a fault is asked again.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise ValueError(f"the judge cache {self.path} is a folder; name a file, for example judge.jsonl")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.damaged = 0
        self._known: dict[str, CachedVerdict] = {}
        self._read_to = 0
        """Offset after the last complete line that was read."""
        self._lock = threading.Lock()

    def get(self, key: str) -> CachedVerdict | None:
        """The verdict of a key, also one that another process has written meanwhile; None = unknown."""
        with self._lock:
            if key not in self._known:
                self._read_new()
            return self._known.get(key)

    def put(self, entry: CachedVerdict) -> None:
        """Append a verdict and wait until it is on the disk."""
        line = json.dumps(entry.model_dump()).encode() + b"\n"
        with self._lock, open(self.path, "ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
            _cut_torn_line(file)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
            self._known[entry.key] = entry

    def _read_new(self) -> None:
        """Take in the complete lines after the last one read."""
        if not self.path.exists() or self.path.stat().st_size <= self._read_to:
            return
        with open(self.path, "rb") as file:
            file.seek(self._read_to)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._read_to += len(complete)
        for line in complete.splitlines():
            try:
                entry = CachedVerdict.model_validate(_parsed(line))
            except (ValidationError, ValueError):
                self.damaged += 1
                continue
            self._known[entry.key] = entry


def _parsed(line: bytes) -> dict[str, Any]:
    return json.loads(line)


def _cut_torn_line(file: IO[bytes]) -> None:
    """Truncate a file that is open for appending after its last newline. Under the lock nobody is writing, so
    what follows it was left by a process that died."""
    end = file.seek(0, os.SEEK_END)
    start = end
    while start:
        step = min(start, 1 << 16)
        file.seek(start - step)
        newline = file.read(step).rfind(b"\n")
        if newline >= 0:
            start += newline + 1 - step
            break
        start -= step
    if start < end:
        file.truncate(start)
    file.seek(0, os.SEEK_END)
