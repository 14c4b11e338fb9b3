"""Files that are replaced whole or not at all, flushed to disk, and their hashes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Give a temporary path to write; afterwards flush it to disk and rename it to `path`.

    When the writing fails, `path` stays as it was and the temporary file is removed.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries (renames, new files) to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's text in one step, flushed to disk."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sync_tree(folder: Path) -> None:
    """Flush every file of a folder and its entries to disk."""
    for file in [*folder.rglob("*"), folder]:
        sync_folder(file)  # the same call for files


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
