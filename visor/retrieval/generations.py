"""Page vectors on disk, memory-mapped: immutable shards, and generations that say which of their pages count.

    current                  number of the generation in service; replaced last
    generations/7.json       manifest: encoder, corpus, and the shards with size and hash of each file
    generations/7/           files that a retriever derived from the vectors, if any
    shards/NAME/vectors.bin  rows × dimension, little-endian, row after row, nothing else
               offsets.bin   int64, pages + 1: the rows of page i are offsets[i]:offsets[i + 1]
               pages.json    page ids, content keys, vector digests in the order of the offsets; the encoder

Generations share shards. A page that is gone or has changed is dead in a newer generation and stays on disk
until its shard is written anew. No pickle and no .npy: `numpy.lib.format.open_memmap` writes a file it cannot
read when a size is a numpy integer. Writing is `vector_writer`'s.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ValidationError

from visor.retrieval.content import check_corpus, index_command, rebuild_hint
from visor.retrieval.disk import FileRecord, difference
from visor.retrieval.encoding import EncoderIdentity
from visor.retrieval.selection import PageTable
from visor.types import SCHEMA_VERSION, PageStore, Record, page_sort_key

CURRENT_FILE = "current"
GENERATIONS, SHARDS = "generations", "shards"
VECTORS_FILE, OFFSETS_FILE, PAGES_FILE = "vectors.bin", "offsets.bin", "pages.json"
DTYPES: dict[str, np.dtype[Any]] = {"float16": np.dtype("<f2"), "float32": np.dtype("<f4")}
SWITCHES = 3
"""Times that an opening starts over because a build replaced the generation meanwhile."""


class ShardPages(Record):
    """`pages.json` of a shard."""

    schema_version: int = SCHEMA_VERSION
    identity: EncoderIdentity
    dtype: Literal["float16", "float32"]
    page_ids: list[str]
    keys: list[str]
    """Hash of what the encoder read of each page, `content.content_key`."""
    digests: list[str]
    """Hash of each page's vectors; equal for equal vectors."""
    files: dict[str, FileRecord]
    """The two other files of the shard."""


class ShardRecord(Record):
    """A shard as a generation sees it."""

    name: str
    rows: int
    page_count: int
    dead: list[int] = []
    """Positions of pages that are not part of the generation, ascending."""
    files: dict[str, FileRecord]


class VectorManifest(Record):
    """`generations/N.json`."""

    schema_version: int = SCHEMA_VERSION
    retriever: str
    settings: dict[str, str] = {}
    """What else the retriever needs to know when it opens the index."""
    generation: int
    identity: EncoderIdentity
    dtype: Literal["float16", "float32"]
    corpus: str
    """Name of the corpus."""
    corpus_hash: str
    page_count: int
    libraries: dict[str, str]
    created: str
    """UTC, ISO 8601."""
    shards: list[ShardRecord]
    files: dict[str, FileRecord] = {}
    """Derived files, by path below the index folder."""


@dataclass(frozen=True)
class Shard:
    """The pages of one shard."""

    name: str
    vectors: np.ndarray
    """(rows, dimension), memory-mapped and read-only."""
    offsets: np.ndarray
    """int64 (pages + 1): the rows of each page."""
    rows: np.ndarray
    """int64 (pages): row of each page in the store's table; −1 for a dead page."""


class VectorStore:
    """The vectors of one generation. Opening reads no vector."""

    def __init__(self, path: Path, manifest: VectorManifest):
        """Raises ValueError naming what is damaged, FileNotFoundError when a shard is gone."""
        self.path = path
        self.manifest = manifest
        self.identity = manifest.identity
        self.generation = manifest.generation
        self.dtype = DTYPES[manifest.dtype]
        pages = [_read_pages(path, manifest, record) for record in manifest.shards]
        self.table = _live_table(path, manifest, pages)
        self.shards = [
            _map_shard(path, manifest, record, shard_pages, self.table)
            for record, shard_pages in zip(manifest.shards, pages, strict=True)
        ]

    def page_vectors(self, page_id: str) -> np.ndarray:
        """The vectors (T, dimension) of one page, as stored. ValueError for an unknown page."""
        row = self.table.row(page_id)
        for shard in self.shards if row is not None else []:
            for position in np.flatnonzero(shard.rows == row):
                return shard.vectors[shard.offsets[position] : shard.offsets[position + 1]]
        raise ValueError(f"the index {self.path} holds no page {page_id!r}")

    def bytes_on_disk(self) -> int:
        """Of the generation's shards, dead pages included, and of its derived files."""
        files = [f for shard in self.manifest.shards for f in shard.files.values()]
        return sum(file.size for file in [*files, *self.manifest.files.values()])


def open_vectors(
    path: str | Path, corpus: PageStore | None = None, identity: EncoderIdentity | None = None
) -> VectorStore:
    """Open the generation in service.

    Raises ValueError, saying which is which and to rebuild, when there is no index, when a file of it is
    missing or damaged, or when it was made for another corpus (or state of it) or with another encoder than
    `identity`; None for either: any.
    """
    path = Path(path)
    for attempt in range(SWITCHES):
        manifest = read_vector_manifest(path, corpus)
        if identity is not None:
            check_identity(path, manifest, identity, corpus)
        check_corpus(path, manifest, corpus)
        try:
            return VectorStore(path, manifest)
        except FileNotFoundError as error:
            # A build that ended meanwhile has removed the shards that its generation no longer names.
            if attempt + 1 == SWITCHES or read_vector_manifest(path).generation == manifest.generation:
                raise ValueError(
                    f"the index {path} is damaged: {error.filename} is missing; run `visor index` again"
                ) from None
    raise AssertionError("unreachable")


def has_vectors(path: str | Path) -> bool:
    """Whether a folder holds a finished generation."""
    return (Path(path) / CURRENT_FILE).is_file()


def read_vector_manifest(path: str | Path, corpus: PageStore | None = None) -> VectorManifest:
    """The manifest of the generation in service. ValueError when there is none or it is damaged; what to do
    then names the `corpus`."""
    path = Path(path)
    if not has_vectors(path):
        raise ValueError(f"{path} holds no index of page vectors; make one with `visor index CORPUS`")
    # Which retriever made it is what cannot be read; folders are named for theirs unless --index is given.
    maker = path.name if path.name in ("dense", "colqwen") else "RETRIEVER"
    rebuild = f"rebuild the index with {index_command(path, corpus, maker)} and the encoder it was made with"
    number = (path / CURRENT_FILE).read_text(encoding="utf-8", errors="replace").strip()
    file = path / GENERATIONS / f"{number}.json"
    try:
        manifest = VectorManifest.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{file} is not an index manifest ({error.errors()[0]['msg']}); {rebuild}") from None
    except (OSError, ValueError):  # a number with a NUL is no path
        raise ValueError(f"the index {path} is damaged: {file} cannot be read; {rebuild}") from None
    if manifest.schema_version != SCHEMA_VERSION:
        raise ValueError(
            f"{file} has schema version {manifest.schema_version}, this program reads {SCHEMA_VERSION}; "
            f"{rebuild}"
        )
    return manifest


def verify_vectors(path: str | Path) -> list[str]:
    """Read every file of the generation in service and name, a sentence each, those whose hash is not the
    manifest's. ValueError when the index cannot be opened at all."""
    path = Path(path)
    manifest = read_vector_manifest(path)
    problems = []
    named = {Path(SHARDS, s.name, name): file for s in manifest.shards for name, file in s.files.items()}
    for relative, record in {**named, **{Path(k): v for k, v in manifest.files.items()}}.items():
        file = path / relative
        if problem := difference(file, record):
            problems.append(
                f"{file} {problem}; remove {file.parent} and run `visor index` again, which "
                "encodes only what is missing"
            )
    return problems


def check_identity(
    path: Path, manifest: VectorManifest, identity: EncoderIdentity, corpus: PageStore | None
) -> None:
    """ValueError, naming both, for an encoder that an index was not made with."""
    if manifest.identity != identity:
        raise ValueError(
            f"the index {path} was made with {describe_difference(manifest.identity, identity)}; search with "
            f"that encoder, or {rebuild_hint(path, manifest, corpus)} and --replace"
        )


def describe_difference(made_with: EncoderIdentity, asked: EncoderIdentity) -> str:
    """ "encoder 'X', not 'Y'", and what else tells the two apart."""
    before, after = made_with.model_dump(), asked.model_dump()
    details = [
        f"{k} {before[k]!r}, not {after[k]!r}" for k in before if before[k] != after[k] and k != "name"
    ]
    if made_with.name == asked.name:
        return f"another version of encoder {asked.name!r} ({'; '.join(details)})"
    return f"encoder {made_with.name!r}, not {asked.name!r}" + (f" ({'; '.join(details)})" if details else "")


def _read_pages(path: Path, manifest: VectorManifest, record: ShardRecord) -> ShardPages:
    """Read and check `pages.json`; the sizes of the other files are checked, their content is not."""
    folder = path / SHARDS / record.name
    data = (folder / PAGES_FILE).read_bytes()
    if hashlib.sha256(data).hexdigest() != record.files[PAGES_FILE].sha256:
        raise _damaged(path, folder / PAGES_FILE, "its content is not what was written")
    pages = ShardPages.model_validate_json(data)
    if pages.identity != manifest.identity:
        raise ValueError(
            f"the index {path} was made with {describe_difference(manifest.identity, pages.identity)} in "
            f"shard {record.name} (pages {pages.page_ids[0]!r} to {pages.page_ids[-1]!r}); rebuild it with "
            "one encoder"
        )
    for name in (VECTORS_FILE, OFFSETS_FILE):
        size, expected = (folder / name).stat().st_size, record.files[name].size
        if size != expected:
            raise _damaged(path, folder / name, f"it has {size} bytes, not {expected}")
    return pages


def _live_table(path: Path, manifest: VectorManifest, pages: list[ShardPages]) -> PageTable:
    live: list[str] = []
    for record, shard_pages in zip(manifest.shards, pages, strict=True):
        dead = set(record.dead)
        live += [page_id for i, page_id in enumerate(shard_pages.page_ids) if i not in dead]
    if len(set(live)) != len(live) or len(live) != manifest.page_count:
        raise ValueError(f"the index {path} is damaged: its shards do not hold each page once; rebuild it")
    return PageTable(sorted(live, key=page_sort_key))


def _map_shard(
    path: Path, manifest: VectorManifest, record: ShardRecord, pages: ShardPages, table: PageTable
) -> Shard:
    folder = path / SHARDS / record.name
    offsets = np.fromfile(folder / OFFSETS_FILE, "<i8")
    dimension, dtype = manifest.identity.dimension, DTYPES[manifest.dtype]
    size = record.files[VECTORS_FILE].size
    whole = len(offsets) == record.page_count + 1 and offsets[0] == 0 and offsets[-1] == record.rows
    if not whole or np.any(np.diff(offsets) < 0) or size != record.rows * dimension * dtype.itemsize:
        raise _damaged(path, folder / OFFSETS_FILE, "it does not fit the vectors")
    rows = np.array([table.row(page_id) for page_id in pages.page_ids], dtype=object)
    rows[[row is None for row in rows]] = -1
    rows[record.dead] = -1
    shape = (record.rows, dimension)
    vectors: np.ndarray = np.zeros(shape, dtype)  # an empty file cannot be mapped
    if record.rows:
        vectors = np.memmap(folder / VECTORS_FILE, dtype, mode="r", shape=shape)
    return Shard(record.name, vectors, offsets, rows.astype(np.int64))


def _damaged(path: Path, file: Path, why: str) -> ValueError:
    return ValueError(f"the index {path} is damaged: {file}: {why}; rebuild it with `visor index`")
