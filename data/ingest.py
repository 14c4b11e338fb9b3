"""Documents → corpus: only new or changed ones are rendered, failures are recorded and named."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from data.corpus_files import (
    IMAGES_FOLDER,
    PAGES_FILE,
    DocumentRecord,
    file_sha256,
    read_corpus,
    sync_folder,
    write_corpus,
)
from data.render import DEFAULT_DPI, DEFAULT_MAX_PIXELS, RenderedPages, RenderSettings
from data.sources import Found, Layout, PageGroup, Source, assign_ids, find_sources
from data.workers import Chunk, ChunkResult, render_chunks
from visor.types import Page, make_page_id

Progress = Callable[[int, int, str], None]
"""Called after each rendered document with (documents done, documents to do, doc_id)."""
CHECKPOINT_SECONDS = 20.0
SMALL_JOB_BYTES = 2_000_000
"""Below this much to render, starting worker processes takes longer than the work."""


@dataclass
class IngestReport:
    """What an ingest did."""

    new: list[str] = field(default_factory=list)
    """Ids of documents rendered in this run."""
    unchanged: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Document id → reason."""
    notes: list[str] = field(default_factory=list)
    """Pages rendered at a lower dpi or left out, of the documents of this run."""
    pages: int = 0
    """Pages in the corpus."""
    pages_without_text: int = 0
    """Of these, pages that text retrieval cannot find."""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """True when at least one of the given documents is in the corpus."""
        return bool(self.new or self.unchanged)

    def summary(self) -> str:
        """The outcome in lines, every failure named."""
        lines = [
            f"{len(self.new)} ingested, {len(self.unchanged)} unchanged, {len(self.removed)} removed, "
            f"{len(self.failed)} failed; {self.pages} pages in the corpus ({self.seconds:.1f} s)"
        ]
        lines += [f"note: {note}" for note in self.notes]
        if self.pages_without_text:
            count = self.pages_without_text
            lines.append(f"note: {count} pages have no text; text retrieval cannot find them")
        lines += [f"failed: {doc_id}: {reason}" for doc_id, reason in self.failed.items()]
        return "\n".join(lines)


def ingest(
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    dpi: float = DEFAULT_DPI,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    image_format: Literal["jpeg", "png"] = "jpeg",
    workers: int | None = None,
    progress: Progress | None = None,
    layout: Layout = find_sources,
) -> IngestReport:
    """Bring the corpus in folder `out` up to date with the PDFs and images under `paths`.

    A document is rendered when it is new, changed, failed before, or was rendered with other settings. One
    whose file below `paths` is gone loses its pages; documents from elsewhere stay. The corpus is saved every
    20 seconds, so that a killed run continues where it was. `workers` counts processes: 1 = this one, None =
    one for each core, or this one for a small job. `layout` finds the documents below `paths`. Raises
    ValueError when `paths` hold no document, a path does not exist, a setting is out of range, or another
    ingest works on `out`.
    """
    started = time.monotonic()
    settings = RenderSettings(dpi=dpi, max_pixels=max_pixels, image_format=image_format)
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    out = Path(out)
    found = layout(paths, out)
    if not found:
        names = ", ".join(str(path) for path in paths)
        raise ValueError(f"no PDF or image found in {names or 'an empty list of paths'}")
    (out / IMAGES_FOLDER).mkdir(parents=True, exist_ok=True)
    with _only_one(out):
        job = _Ingest(out, settings, found, [Path(os.path.abspath(path)) for path in paths])
        job.run(workers, progress)
        job.report.seconds = time.monotonic() - started
        return job.report


class _Ingest:
    def __init__(
        self, out: Path, settings: RenderSettings, found: Sequence[Found | PageGroup], roots: list[Path]
    ):
        self.out, self.settings = out, settings
        self.documents: dict[str, DocumentRecord] = {}
        self.pages: dict[str, Page] = {}
        if (out / PAGES_FILE).exists():
            self.documents, self.pages = read_corpus(out)
        self.report = IngestReport()
        known = {doc_id: record.source for doc_id, record in self.documents.items()}
        lost = {doc_id for doc_id, source in known.items() if not Path(source).is_file()}
        self.sources = {source.doc_id: source for source in assign_ids(found, known, lost)}
        self.gone = [
            doc_id
            for doc_id in sorted(lost - set(self.sources))
            if any(Path(known[doc_id]).is_relative_to(root) for root in roots)
        ]

    def run(self, workers: int | None, progress: Progress | None) -> None:
        for doc_id in self.gone:
            self._drop_pages(doc_id)
            del self.documents[doc_id]
            self.report.removed.append(doc_id)
        todo = self._changed()
        write_corpus(self.out, self.documents, self.pages)
        if workers is None:
            total = sum(file.stat().st_size for source, _ in todo for file in _files(source))
            workers = 1 if total < SMALL_JOB_BYTES else min(os.cpu_count() or 1, len(todo))
        saved = time.monotonic()
        for done, record in enumerate(self._render(todo, workers), start=1):
            if progress is not None:
                progress(done, len(todo), record.doc_id)
            if time.monotonic() - saved > CHECKPOINT_SECONDS:
                write_corpus(self.out, self.documents, self.pages)
                saved = time.monotonic()
        write_corpus(self.out, self.documents, self.pages)
        self._remove_unused_images()
        self.report.pages = len(self.pages)
        self.report.pages_without_text = sum(not (p.text or p.caption) for p in self.pages.values())

    def _changed(self) -> list[tuple[Source, str]]:
        """The sources to render, each with its hash; unchanged ones are reported and keep their pages."""
        stored: dict[str, list[Page]] = {}
        for page in self.pages.values():
            stored.setdefault(page.doc_id, []).append(page)
        todo = []
        for doc_id, source in self.sources.items():
            try:
                digest = _digest(source)
            except OSError as error:
                self._fail(
                    source, "", f"{Path(error.filename or source.path).name} cannot be read: {error.strerror}"
                )
                continue
            record = self.documents.get(doc_id)
            files = [self.out / page.image for page in stored.get(doc_id, [])]
            if (
                record is not None
                and (record.status, record.sha256) == ("done", digest)
                and record.recipe == self.settings.recipe
                and all(file.is_file() for file in files)
            ):
                self.documents[doc_id] = record.model_copy(update={"source": str(source.path)})
                self.report.unchanged.append(doc_id)
            else:
                todo.append((source, digest))
        return todo

    def _render(self, todo: list[tuple[Source, str]], workers: int) -> Iterator[DocumentRecord]:
        """Render documents; yields the record of each when its last chunk is done."""
        waiting = {source.doc_id: _Partial(source, digest) for source, digest in todo}
        for result in render_chunks(self._first_chunks(todo), workers):
            partial = waiting.get(result.chunk.doc_id)
            if partial is None:
                continue  # an earlier chunk of the document failed
            if partial.add(result):
                del waiting[result.chunk.doc_id]
                yield self._finish(partial, result)

    def _first_chunks(self, todo: list[tuple[Source, str]]) -> Iterator[Chunk]:
        for source, digest in todo:
            folder = self.out / IMAGES_FOLDER / folder_name(source.doc_id, digest, self.settings.recipe)
            folder.mkdir(exist_ok=True)
            yield Chunk(source.doc_id, source.path, folder, self.settings, pages=source.pages)

    def _finish(self, partial: _Partial, result: ChunkResult) -> DocumentRecord:
        source, folder = partial.source, result.chunk.folder
        rendered = partial.joined()
        if result.error or not rendered.pages:
            reason = result.error or f"{source.path.name}: none of its pages could be rendered"
            return self._fail(source, partial.digest, reason)
        sync_folder(folder)
        self._drop_pages(source.doc_id)
        for page in rendered.pages:
            page_id = make_page_id(source.doc_id, page.number)
            self.pages[page_id] = Page(
                page_id=page_id,
                doc_id=source.doc_id,
                page_number=page.number,
                image=f"{IMAGES_FOLDER}/{folder.name}/{page.file_name}",
                width=page.width,
                height=page.height,
                text=page.text,
                sha256=page.sha256,
            )
        self.documents[source.doc_id] = DocumentRecord(
            doc_id=source.doc_id,
            status="done",
            page_count=source.pages[-1].number if source.pages else rendered.page_count,
            notes=rendered.notes,
            sha256=partial.digest,
            recipe=self.settings.recipe,
            folder=folder.name,
            source=str(source.path),
        )
        self.report.new.append(source.doc_id)
        self.report.notes += [f"{source.doc_id}: {note}" for note in rendered.notes]
        return self.documents[source.doc_id]

    def _fail(self, source: Source, digest: str, reason: str) -> DocumentRecord:
        self._drop_pages(source.doc_id)
        record = DocumentRecord(
            doc_id=source.doc_id,
            status="failed",
            reason=reason,
            sha256=digest,
            source=str(source.path),
        )
        self.documents[source.doc_id] = record
        self.report.failed[source.doc_id] = reason
        return record

    def _drop_pages(self, doc_id: str) -> None:
        record = self.documents.get(doc_id)
        for number in range(1, record.page_count + 1 if record else 1):
            self.pages.pop(make_page_id(doc_id, number), None)

    def _remove_unused_images(self) -> None:
        used = {record.folder for record in self.documents.values()}
        for folder in (self.out / IMAGES_FOLDER).iterdir():
            if folder.name not in used:
                shutil.rmtree(folder)


@dataclass
class _Partial:
    """A document some of whose chunks are done."""

    source: Source
    digest: str
    chunks: dict[int, RenderedPages] = field(default_factory=dict)
    """By first page; they come in any order."""

    def add(self, result: ChunkResult) -> bool:
        """Take a chunk's pages; True when the document is complete or failed."""
        if result.rendered is None:
            return True
        self.chunks[result.chunk.first] = result.rendered
        return len(self.chunks) == result.chunk.chunks_of(result.rendered.page_count)

    def joined(self) -> RenderedPages:
        chunks = [self.chunks[first] for first in sorted(self.chunks)]
        return RenderedPages(
            page_count=chunks[0].page_count if chunks else 0,
            pages=[page for chunk in chunks for page in chunk.pages],
            notes=[note for chunk in chunks for note in chunk.notes],
        )


def _files(source: Source) -> list[Path]:
    return [page.path for page in source.pages] or [source.path]


def _digest(source: Source) -> str:
    """Hash of a document: of its file, or of the numbers and files of its page images."""
    if not source.pages:
        return file_sha256(source.path)
    parts = "".join(f"{number}:{file_sha256(path)}\n" for number, path in source.pages)
    return hashlib.sha256(parts.encode()).hexdigest()


def folder_name(doc_id: str, digest: str, recipe: str) -> str:
    """Folder of a document version's images: readable, safe on any file system, and never used twice."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", doc_id)[-40:].strip("._") or "document"
    key = hashlib.sha256("\0".join([doc_id, digest, recipe]).encode()).hexdigest()[:16]
    return f"{readable}-{key}"


@contextmanager
def _only_one(out: Path) -> Iterator[None]:
    """Hold the corpus's lock; the system releases it when the process ends, however it ends."""
    with (out / ".lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another ingest is working on {out}; wait for it to end") from None
        yield
