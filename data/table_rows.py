"""Rows of a data set as it lies on disk: parquet files, Arrow files of `datasets`, or JSON lines.

Columns are read only when asked for and batches are small, so that rows with pictures stay out of memory.
Nothing is downloaded and no code of a data set is run.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from visor.text_files import read_text

SUFFIXES = (".parquet", ".arrow", ".jsonl")
BATCH_ROWS = 4
"""Rows with twenty slides each: a batch is some ten megabytes."""
BUFFER_BYTES = 1 << 20
"""Read at once of a parquet column; a whole column of pictures would be held in memory otherwise."""
_SPLIT = re.compile(r"(?:^|[_./-])(train|val|valid|validation|dev|test)(?=[_./-]|$)", re.IGNORECASE)
_SPLIT_NAMES = {"valid": "val", "validation": "val"}


@dataclass(frozen=True)
class RowFile:
    """One file of rows."""

    path: Path
    split: str
    """The split that the file's or its folder's name says, such as `test`; "" when it says none."""

    @property
    def fingerprint(self) -> str:
        """Changes when the file does, without reading it."""
        status = self.path.stat()
        return f"{self.path.name}:{status.st_size}:{status.st_mtime_ns}"

    def columns(self) -> list[str]:
        """The names of its columns; [] for JSON lines, whose rows say."""
        if self.path.suffix == ".parquet":
            return self._parquet().schema_arrow.names
        return self._stream().schema.names if self.path.suffix == ".arrow" else []

    def rows(
        self, columns: Sequence[str], only: Collection[int] | None = None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """(position from 0, row) with those of the columns that the file has; `only` picks positions.

        Raises ValueError naming the file, and the line of JSON lines, where it cannot be read.
        """
        if self.path.suffix == ".jsonl":
            for position, (_, record) in enumerate(json_lines(self.path)):
                if only is None or position in only:
                    yield position, {name: record[name] for name in columns if name in record}
            return
        names = [name for name in columns if name in self.columns()]
        position = 0
        try:
            for first, batch in self._batches(names, only):
                for position in range(first, first + batch.num_rows):
                    if only is None or position in only:
                        yield position, batch.slice(position - first, 1).to_pylist()[0]
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.path} is damaged near row {position + 1}: {error}") from None

    def _batches(
        self, names: list[str], only: Collection[int] | None
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(position of its first row, batch); row groups that hold none of `only` are not read."""
        first = 0
        if self.path.suffix == ".arrow":
            for batch in self._stream():
                yield first, batch.select(names)
                first += batch.num_rows
            return
        file = self._parquet()
        for group in range(file.num_row_groups):
            after = first + file.metadata.row_group(group).num_rows
            if only is None or any(first <= position < after for position in only):
                start = first
                for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=[group], columns=names):
                    yield start, batch
                    start += batch.num_rows
            first = after

    def _parquet(self) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(self.path, buffer_size=BUFFER_BYTES)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.path} is not a parquet file: {error}") from None

    def _stream(self) -> pa.ipc.RecordBatchStreamReader:
        try:
            return pa.ipc.open_stream(pa.memory_map(str(self.path)))
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.path} is not an Arrow file of `datasets`: {error}") from None


def find_row_files(path: str | Path) -> list[RowFile]:
    """The files of rows at `path`: a file, a folder (searched with its subfolders), or a pattern with `*`.

    Shards are in natural order. Raises ValueError when there is none.
    """
    given = Path(path)
    if given.is_dir():
        files = [file for file in given.rglob("*") if file.suffix in SUFFIXES and file.is_file()]
        files = [file for file in files if not any(p.startswith(".") for p in file.relative_to(given).parts)]
    elif given.is_file():
        files = [given]
    else:
        files = [Path(name) for name in glob.glob(str(path))]
    files = [file for file in files if not file.name.startswith("cache-")]  # intermediate files of `datasets`
    if not files:
        raise ValueError(f"{path}: there is no file {' or '.join('*' + suffix for suffix in SUFFIXES)}")
    root = given if given.is_dir() else None
    return [RowFile(file, split_of(file, root)) for file in sorted(files, key=natural_key)]


def split_of(path: Path, root: Path | None = None) -> str:
    """The split that a file's name has as a word, else that is the whole name of a folder above it.

    Folders are looked at from the file up to `root`; without one only the nearest.
    """
    folders = path.relative_to(root).parts[:-1] if root else path.parts[-2:-1]
    named = _SPLIT.search(path.name) or next(filter(None, map(_SPLIT.fullmatch, reversed(folders))), None)
    name = named[1].lower() if named else ""
    return _SPLIT_NAMES.get(name, name)


def natural_key(path: Path) -> list[tuple[int, int | str]]:
    """Sorts numbers in names by value: `part-2` before `part-10`."""
    parts = re.split(r"(\d+)", str(path))
    return [(1, int(part)) if odd % 2 else (0, part) for odd, part in enumerate(parts)]


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of a JSON-lines file; a byte order mark, CRLF and blank lines are tolerated.

    Raises ValueError naming file and line for a line that is no JSON object.
    """
    # Split at line feeds only: str.splitlines would also cut at U+2028 inside a value.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON: {error.msg}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: not an object")
        yield number, record
