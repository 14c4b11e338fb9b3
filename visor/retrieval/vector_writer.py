"""Build or update the vectors of a corpus: encode what is new, keep the rest, then switch generations."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import numpy as np

from visor.files import file_sha256, sync_tree, write_atomically
from visor.retrieval.content import check_owner, content_key, corpus_hash, corpus_name
from visor.retrieval.disk import build_lock
from visor.retrieval.encoding import Encoder, EncoderIdentity, PageVectors
from visor.retrieval.generations import (
    CURRENT_FILE,
    GENERATIONS,
    SHARDS,
    FileRecord,
    VectorManifest,
    VectorStore,
    describe_difference,
    has_vectors,
    read_vector_manifest,
)
from visor.retrieval.report import BuildReport, Progress
from visor.retrieval.shard_files import ShardFiles
from visor.types import Page, PageStore, page_sort_key

MAX_DEAD = 0.3
"""A shard with a larger share of dead pages is written anew."""
MAX_SMALL = 8
"""When more shards than this hold less than half a shard's pages, they are merged."""

COPIED_AT_ONCE = 64
"""Pages whose vectors are in memory at once when shards are written anew."""

Derive = Callable[[VectorStore, Path], None]
"""Writes further files of a generation into the folder it is given; they are part of the generation."""


def build_vectors(
    corpus: PageStore,
    path: str | Path,
    encoder: Encoder,
    *,
    batch_size: int = 8,
    progress: Progress | None = None,
    shard_pages: int = 4096,
    retriever: str | None = None,
    settings: Mapping[str, str] | None = None,
    derive: Derive | None = None,
    replace: bool = False,
) -> BuildReport:
    """Make the index folder `path` hold the vectors of the corpus as it is now.

    Pages whose content is in the folder already are not encoded: those of the generation in service and those
    of a build that did not finish. Until the very end the generation in service stays as it was.

    `retriever`: its name in the manifest (dense or colqwen by the encoder's kind when None). `settings`: kept
    in the manifest for the retriever. `replace`: the folder may hold another corpus's index, or
    another encoder's vectors, which are dropped.

    Raises ValueError for a corpus without pages, a folder of another corpus or encoder, a build under way in
    another process, and vectors that are not finite or not of the encoder's dimension, naming the page.
    """
    started = time.perf_counter()
    path = Path(path)
    pages = sorted(corpus.pages(), key=lambda page: page_sort_key(page.page_id))
    if not pages:
        raise ValueError(f"{corpus_name(corpus)} has no pages; there is nothing to index")
    with build_lock(path):
        build = _Build(corpus, path, encoder, shard_pages)
        if not replace:
            check_owner(path, build.previous, corpus)
            build.check_encoder()
        build.plan(pages)
        build.write(batch_size, progress)
        name = retriever or {"single": "dense", "multi": "colqwen"}[encoder.identity.kind]
        report = build.finish(name, dict(settings or {}), derive)
    report.seconds = time.perf_counter() - started
    return report


class _Build:
    """One build: what is on disk, what is kept of it, what has to be written."""

    def __init__(self, corpus: PageStore, path: Path, encoder: Encoder, shard_pages: int):
        self.corpus = corpus
        self.path = path
        self.encoder = encoder
        self.identity: EncoderIdentity = encoder.identity
        self.dtype: Literal["float16", "float32"] = (
            "float32" if encoder.identity.kind == "single" else "float16"
        )
        self.shard_pages = shard_pages
        self.notes: list[str] = []
        self.previous = self._previous()
        if self.previous and self.previous.identity != self.identity:
            self.notes.append(f"replaces the index made with encoder {self.previous.identity.name!r}")
        self.kept: dict[str, set[int]] = {}
        """Shard → positions of the pages that are part of the new generation."""
        self.encoded = 0

    def _previous(self) -> VectorManifest | None:
        if not has_vectors(self.path):
            return None
        try:
            return read_vector_manifest(self.path)
        except ValueError as error:
            reason = str(error).partition("; rebuild")[0]  # this build is what the rest asks for
            self.notes.append(f"the index before could not be read and is made anew: {reason}")
            return None

    def check_encoder(self) -> None:
        """ValueError when the vectors that are there come from another encoder: they would all be lost."""
        if self.previous and self.previous.identity != self.identity:
            raise ValueError(
                f"{self.path} holds the vectors of {self.previous.page_count} pages made with "
                f"{describe_difference(self.previous.identity, self.identity)}; give another folder with "
                "--index, or --replace to encode all pages anew"
            )

    # ------------------------------------------------------------ plan

    def plan(self, pages: Sequence[Page]) -> None:
        """Find each page's vectors among the shards on disk, and list the pages that have to be written."""
        self.pages = pages
        self.keys = {p.page_id: content_key(p, self.identity.reads, self.corpus) for p in pages}
        self.shards = self._usable_shards()
        self.sources: dict[str, tuple[ShardFiles, int]] = {}
        """Content key → where its vectors are."""
        own: dict[tuple[str, str], tuple[ShardFiles, int]] = {}
        for shard in self.shards.values():
            for position, page in enumerate(shard.pages):
                self.sources.setdefault(page.key, (shard, position))
                own.setdefault((page.page_id, page.key), (shard, position))
        for page_id, key in self.keys.items():
            if (page_id, key) in own:
                shard, position = own[page_id, key]
                self.kept.setdefault(shard.folder.name, set()).add(position)
        self.removed = self._count_removed()
        for name in self._shards_to_rewrite():
            del self.kept[name]
        there = {self.shards[name].pages[i].page_id for name, at in self.kept.items() for i in at}
        self.to_write = [page for page in pages if page.page_id not in there]

    def _usable_shards(self) -> dict[str, ShardFiles]:
        """Shards of this encoder by folder name: those in service first, then what unfinished builds left."""
        folders = sorted((self.path / SHARDS).glob("*")) if (self.path / SHARDS).is_dir() else []
        serving = {shard.name for shard in self.previous.shards} if self.previous else set()
        found = {}
        for folder in sorted(folders, key=lambda folder: (folder.name not in serving, folder.name)):
            shard = ShardFiles.read(folder)
            if shard is None and folder.name in serving:
                self.notes.append(f"shard {folder.name} is damaged; its pages are encoded again")
            if shard and shard.identity == self.identity and shard.dtype_name == self.dtype:
                found[folder.name] = shard
        return found

    def _count_removed(self) -> int:
        """Pages of the generation before that are gone or have other content now."""
        if self.previous is None:
            return 0
        carried = 0
        for record in self.previous.shards:
            shard, dead = self.shards.get(record.name), set(record.dead)
            for position, page in enumerate(shard.pages if shard else []):
                carried += position not in dead and self.keys.get(page.page_id) == page.key
        return self.previous.page_count - carried

    def _shards_to_rewrite(self) -> list[str]:
        sealed = [name for name in self.kept if self.shards[name].sealed]
        thin = [n for n in sealed if len(self.kept[n]) < (1 - MAX_DEAD) * len(self.shards[n].pages)]
        small = [n for n in sealed if n not in thin and len(self.shards[n].pages) < self.shard_pages // 2]
        return thin + (small if len(small) > MAX_SMALL else [])

    # ------------------------------------------------------------ write

    def write(self, batch_size: int, progress: Progress | None) -> None:
        """Encode the pages whose content is nowhere on disk, each content once, and copy the others."""
        fresh: dict[str, Page] = {}
        for page in self.to_write:
            if self.keys[page.page_id] not in self.sources:
                fresh.setdefault(self.keys[page.page_id], page)
        to_encode = list(fresh.values())
        for start in range(0, len(to_encode), batch_size):
            batch = to_encode[start : start + batch_size]
            vectors = self.encoder.encode_pages(batch, self.corpus)
            assert len(vectors) == len(batch), "one PageVectors for each page"
            self._append(batch, [self._checked(page, v) for page, v in zip(batch, vectors, strict=True)])
            self.encoded += len(batch)
            if progress:
                progress(self.encoded, len(to_encode))
        encoded = {page.page_id for page in to_encode}
        to_copy = [page for page in self.to_write if page.page_id not in encoded]
        for start in range(0, len(to_copy), COPIED_AT_ONCE):
            batch = to_copy[start : start + COPIED_AT_ONCE]
            sources = [self.sources[self.keys[page.page_id]] for page in batch]
            self._append(batch, [shard.vectors(position) for shard, position in sources])

    def _checked(self, page: Page, vectors: PageVectors) -> np.ndarray:
        """The vectors to store, (0, dimension) when all are zero. ValueError when they are unusable."""
        values = np.asarray(vectors.vectors_TD)
        expected = self.identity.dimension
        if values.ndim != 2 or values.shape[1] != expected:
            raise ValueError(
                f"encoder {self.identity.name!r} gave page {page.page_id!r} vectors of shape {values.shape}, "
                f"expected (tokens, {expected})"
            )
        if self.identity.kind == "single" and len(values) > 1:
            raise ValueError(f"encoder {self.identity.name!r} gave page {page.page_id!r} several vectors")
        with np.errstate(over="ignore"):
            stored = values.astype(self.dtype)
        if not np.isfinite(stored).all():
            raise ValueError(
                f"encoder {self.identity.name!r} gave page {page.page_id!r} vectors that are not finite in "
                f"{self.dtype}; what was encoded before is kept: run the build again with the fault removed "
                "(for example another --dtype)"
            )
        return stored if stored.any() else stored[:0]

    def _append(self, pages: Sequence[Page], vectors: Sequence[np.ndarray]) -> None:
        """Add pages to the growing shard, and seal it when it is full."""
        while pages:
            room = self._append_to_one(pages, vectors)
            pages, vectors = pages[room:], vectors[room:]

    def _append_to_one(self, pages: Sequence[Page], vectors: Sequence[np.ndarray]) -> int:
        """Add as many pages as one shard has room for; returns their number."""
        shard = next((s for s in self.shards.values() if not s.sealed), None)
        if shard is None:
            shard = ShardFiles.create(self.path, self.identity, self.dtype)
            self.shards[shard.folder.name] = shard
        first = len(shard.pages)
        room = max(1, self.shard_pages - first)
        keys = [self.keys[page.page_id] for page in pages[:room]]
        shard.append([page.page_id for page in pages[:room]], keys, vectors[:room])
        for position, key in enumerate(keys, start=first):
            self.kept.setdefault(shard.folder.name, set()).add(position)
            self.sources.setdefault(key, (shard, position))
        if len(shard.pages) >= self.shard_pages:
            shard.seal()
        return room

    # ------------------------------------------------------------ finish

    def finish(self, retriever: str, settings: dict[str, str], derive: Derive | None) -> BuildReport:
        """Write the manifest, put the new generation into service and remove what no generation needs."""
        for name, shard in self.shards.items():
            if not shard.sealed and name in self.kept:
                shard.seal()
        manifest = VectorManifest(
            retriever=retriever,
            settings=settings,
            generation=self.previous.generation + 1 if self.previous else self._next_number(),
            identity=self.identity,
            dtype=self.dtype,
            corpus=corpus_name(self.corpus),
            corpus_hash=corpus_hash(self.corpus.pages()),
            page_count=len(self.pages),
            libraries=self.encoder.libraries(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            shards=[self.shards[name].record(self.kept[name]) for name in sorted(self.kept, key=self._place)],
        )
        if not self._unchanged(manifest):
            self._commit(manifest, derive)
        else:
            assert self.previous is not None
            manifest = self.previous
        self._clean(manifest)
        return self._report(manifest)

    def _place(self, name: str) -> tuple[str, int]:
        """Shards stand in the order of their first pages."""
        return min(page_sort_key(self.shards[name].pages[i].page_id) for i in self.kept[name])

    def _next_number(self) -> int:
        """After any generation whose manifest is there, in service or not."""
        numbers = [int(f.stem) for f in (self.path / GENERATIONS).glob("*.json") if f.stem.isdigit()]
        return max(numbers, default=0) + 1

    def _unchanged(self, manifest: VectorManifest) -> bool:
        fixed = {"created": "", "generation": 0, "files": {}, "libraries": {}}
        return self.previous is not None and (
            manifest.model_copy(update=fixed) == self.previous.model_copy(update=fixed)
        )

    def _commit(self, manifest: VectorManifest, derive: Derive | None) -> None:
        (self.path / GENERATIONS).mkdir(exist_ok=True)
        if derive:
            folder = self.path / GENERATIONS / str(manifest.generation)
            shutil.rmtree(folder, ignore_errors=True)  # of a build that was killed here
            folder.mkdir()
            derive(VectorStore(self.path, manifest), folder)
            sync_tree(folder)
            manifest.files = {
                file.relative_to(self.path).as_posix(): FileRecord(
                    size=file.stat().st_size, sha256=file_sha256(file)
                )
                for file in sorted(folder.rglob("*"))
                if file.is_file()
            }
        file = self.path / GENERATIONS / f"{manifest.generation}.json"
        write_atomically(file, manifest.model_dump_json(indent=1) + "\n")
        write_atomically(self.path / CURRENT_FILE, f"{manifest.generation}\n")

    def _clean(self, manifest: VectorManifest) -> None:
        named = {shard.name for shard in manifest.shards}
        for folder in (self.path / SHARDS).glob("*"):
            if folder.name not in named:
                shutil.rmtree(folder)
        for entry in (self.path / GENERATIONS).glob("*"):
            if entry.stem != str(manifest.generation):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def _report(self, manifest: VectorManifest) -> BuildReport:
        groups: dict[str, list[str]] = {}
        empty = []
        for name, live in self.kept.items():
            for position in live:
                page = self.shards[name].pages[position]
                if page.row_count:
                    groups.setdefault(page.digest, []).append(page.page_id)
                else:
                    empty.append(page.page_id)
        same = [sorted(group, key=page_sort_key) for group in groups.values() if len(group) > 1]
        return BuildReport(
            retriever=manifest.retriever,
            corpus=manifest.corpus,
            path=str(self.path),
            page_count=manifest.page_count,
            generation=manifest.generation,
            encoded=self.encoded,
            reused=len(self.pages) - self.encoded,
            removed=self.removed,
            empty=sorted(empty, key=page_sort_key),
            duplicates=sorted(same, key=lambda group: page_sort_key(group[0])),
            truncated=getattr(self.encoder, "truncated", 0),
            bytes_on_disk=VectorStore(self.path, manifest).bytes_on_disk(),
            notes=self.notes,
        )
