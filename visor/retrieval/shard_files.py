"""One shard while it is written, and read again as a source of vectors that need not be encoded anew.

A growing shard is its own journal: each batch is appended to `vectors.bin`, flushed, then named in
`pages.jsonl`. After a kill the named pages are kept and anything behind them is cut off. Sealing writes
`offsets.bin` and `pages.json` and removes the journal; a sealed shard never changes.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import ValidationError

from visor.files import file_sha256, sync_folder, write_atomically
from visor.retrieval.encoding import EncoderIdentity
from visor.retrieval.generations import (
    DTYPES,
    OFFSETS_FILE,
    PAGES_FILE,
    SHARDS,
    VECTORS_FILE,
    FileRecord,
    ShardPages,
    ShardRecord,
)
from visor.types import Record

JOURNAL_FILE = "pages.jsonl"


class _JournalHead(Record):
    """First line of a journal."""

    identity: EncoderIdentity
    dtype: Literal["float16", "float32"]


class _JournalPage(Record):
    """Each further line."""

    page_id: str
    key: str
    digest: str
    row_count: int


class ShardFiles:
    """A shard folder, growing or sealed."""

    def __init__(self, folder: Path, head: _JournalHead, pages: list[_JournalPage], sealed: bool):
        self.folder = folder
        self.identity = head.identity
        self.dtype_name = head.dtype
        self.dtype = DTYPES[head.dtype]
        self.sealed = sealed
        self.pages = pages
        self._offsets = [0]
        for page in pages:
            self._offsets.append(self._offsets[-1] + page.row_count)
        self._map: np.ndarray | None = None

    @classmethod
    def create(
        cls, index: Path, identity: EncoderIdentity, dtype: Literal["float16", "float32"]
    ) -> ShardFiles:
        """A new, growing shard of an index folder."""
        folder = index / SHARDS / uuid.uuid4().hex[:12]
        folder.mkdir(parents=True)
        head = _JournalHead(identity=identity, dtype=dtype)
        (folder / VECTORS_FILE).touch()
        write_atomically(folder / JOURNAL_FILE, head.model_dump_json() + "\n")
        sync_folder(folder.parent)
        return cls(folder, head, [], sealed=False)

    @classmethod
    def read(cls, folder: Path) -> ShardFiles | None:
        """The shard in a folder, its unfinished tail cut off; None when nothing of it can be used."""
        try:
            if (folder / PAGES_FILE).is_file():
                return cls._read_sealed(folder)
            return cls._read_growing(folder)
        except (OSError, ValueError, IndexError):
            return None

    @classmethod
    def _read_sealed(cls, folder: Path) -> ShardFiles | None:
        listed = ShardPages.model_validate_json((folder / PAGES_FILE).read_bytes())
        if any((folder / name).stat().st_size != file.size for name, file in listed.files.items()):
            return None
        offsets = np.fromfile(folder / OFFSETS_FILE, "<i8")
        pages = [
            _JournalPage(page_id=page_id, key=key, digest=digest, row_count=int(count))
            for page_id, key, digest, count in zip(
                listed.page_ids, listed.keys, listed.digests, np.diff(offsets), strict=True
            )
        ]
        return cls(folder, _JournalHead(identity=listed.identity, dtype=listed.dtype), pages, sealed=True)

    @classmethod
    def _read_growing(cls, folder: Path) -> ShardFiles:
        """Keeps the pages up to the first that is not whole, and cuts both files behind it."""
        with (folder / JOURNAL_FILE).open("rb") as stream:
            lines = stream.readlines()
        head = _JournalHead.model_validate_json(lines[0])
        row_size = head.identity.dimension * DTYPES[head.dtype].itemsize
        pages: list[_JournalPage] = []
        with (folder / VECTORS_FILE).open("r+b") as vectors:
            end = 0
            for line in lines[1:]:
                try:
                    page = _JournalPage.model_validate_json(line) if line.endswith(b"\n") else None
                except ValidationError:
                    page = None
                data = vectors.read(page.row_count * row_size) if page else b""
                if page is None or len(data) != page.row_count * row_size or _digest(data) != page.digest:
                    break
                pages.append(page)
                end += len(data)
            vectors.truncate(end)
        os.truncate(folder / JOURNAL_FILE, sum(len(line) for line in lines[: len(pages) + 1]))
        return cls(folder, head, pages, sealed=False)

    def vectors(self, position: int) -> np.ndarray:
        """The vectors (T, dimension) of the page at a position."""
        first, end = self._offsets[position], self._offsets[position + 1]
        if first == end:
            return np.zeros((0, self.identity.dimension), self.dtype)
        if self._map is None or len(self._map) < end:
            shape = (self._offsets[-1], self.identity.dimension)
            self._map = np.memmap(self.folder / VECTORS_FILE, self.dtype, mode="r", shape=shape)
        return self._map[first:end]

    def append(self, page_ids: Sequence[str], keys: Sequence[str], vectors: Sequence[np.ndarray]) -> None:
        """Add pages; they survive a kill from here on."""
        assert not self.sealed
        data = [np.ascontiguousarray(v, self.dtype).tobytes() for v in vectors]
        with (self.folder / VECTORS_FILE).open("ab") as stream:
            stream.write(b"".join(data))
            stream.flush()
            os.fsync(stream.fileno())
        pages = [
            _JournalPage(page_id=page_id, key=key, digest=_digest(d), row_count=len(v))
            for page_id, key, d, v in zip(page_ids, keys, data, vectors, strict=True)
        ]
        with (self.folder / JOURNAL_FILE).open("a", encoding="utf-8") as stream:
            stream.write("".join(page.model_dump_json() + "\n" for page in pages))
            stream.flush()
            os.fsync(stream.fileno())
        for page in pages:
            self.pages.append(page)
            self._offsets.append(self._offsets[-1] + page.row_count)

    def seal(self) -> None:
        """Make the shard final."""
        np.asarray(self._offsets, "<i8").tofile(self.folder / OFFSETS_FILE)
        for name in (VECTORS_FILE, OFFSETS_FILE):
            sync_folder(self.folder / name)
        listed = ShardPages(
            identity=self.identity,
            dtype=self.dtype_name,
            page_ids=[page.page_id for page in self.pages],
            keys=[page.key for page in self.pages],
            digests=[page.digest for page in self.pages],
            files={name: _file_record(self.folder / name) for name in (VECTORS_FILE, OFFSETS_FILE)},
        )
        write_atomically(self.folder / PAGES_FILE, listed.model_dump_json() + "\n")
        (self.folder / JOURNAL_FILE).unlink()
        sync_folder(self.folder)
        self.sealed = True

    def record(self, live: set[int]) -> ShardRecord:
        """The sealed shard in a generation of which the pages at `live` are part."""
        assert self.sealed
        listed = ShardPages.model_validate_json((self.folder / PAGES_FILE).read_bytes())
        return ShardRecord(
            name=self.folder.name,
            rows=self._offsets[-1],
            page_count=len(self.pages),
            dead=sorted(set(range(len(self.pages))) - live),
            files={**listed.files, PAGES_FILE: _file_record(self.folder / PAGES_FILE)},
        )


def _file_record(file: Path) -> FileRecord:
    return FileRecord(size=file.stat().st_size, sha256=file_sha256(file))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()
