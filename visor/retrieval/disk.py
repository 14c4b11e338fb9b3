"""What an index manifest keeps of its files, and the lock of a folder that one build may write."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from visor.files import file_sha256
from visor.types import Record

LOCK_FILE = "lock"


class FileRecord(Record):
    """What a manifest keeps of a file."""

    size: int
    """Bytes."""
    sha256: str


def file_record(path: Path) -> FileRecord:
    return FileRecord(size=path.stat().st_size, sha256=file_sha256(path))


def difference(path: Path, record: FileRecord) -> str | None:
    """What tells a file from the one that was recorded, after "PATH …"; None when it is the same."""
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    if size != record.size:
        return f"has {size} bytes, not {record.size}"
    return None if file_sha256(path) == record.sha256 else "is not what was written"


def in_the_way(folder: Path) -> str | None:
    """A sentence about a file that is where an index folder, or a folder above it, should be."""
    for place in (folder, *folder.parents):
        if os.path.lexists(place) and not place.is_dir():
            return (
                f"{place} is a file and no folder, in the way of the index {folder}; move it away, or name "
                "another folder with --index"
            )
    return None


@contextmanager
def build_lock(folder: Path) -> Iterator[None]:
    """Hold the right to write an index folder, which is made if absent.

    ValueError when another process holds it, and when the folder cannot be made or written. The lock ends
    with its process, however that ends.
    """
    if blocked := in_the_way(folder):
        raise ValueError(blocked)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK_FILE).open("a")
    except OSError as error:
        raise ValueError(f"the index folder {folder} cannot be written: {error.strerror}") from None
    with lock as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is building the index {folder}; wait until it is done"
            ) from None
        yield
