"""First stage of an ingest: new and changed documents become pages of the corpus."""

from __future__ import annotations

import errno
import hashlib
import re
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data.chunks import Chunk, rendered_pages
from data.corpus_files import IMAGES_FOLDER, JOURNAL_FOLDER, DocumentRecord, legible, source_of
from data.corpus_writer import CorpusWriter
from data.document_job import DocumentJob, NotRegular, PageCount, files_state
from data.ingest_report import IngestReport, OnProgress, Progress
from data.render import RenderSettings, joined_notes
from data.sources import Found, PageGroup, Source, assign_ids
from data.workers import WorkerPool
from visor.files import file_sha256
from visor.types import Page, make_page_id


class RenderStage:
    """Brings the documents of a corpus up to date with the files that were found."""

    def __init__(
        self,
        corpus: CorpusWriter,
        settings: RenderSettings,
        found: Sequence[Found | PageGroup],
        roots: list[Path],
        report: IngestReport,
    ) -> None:
        self.corpus, self.settings, self.report = corpus, settings, report
        known = {doc_id: str(record.path) for doc_id, record in corpus.documents.items()}
        lost = {doc_id for doc_id, path in known.items() if not Path(path).is_file()}
        self.sources = {source.doc_id: source for source in assign_ids(found, known, lost)}
        self.gone = [
            doc_id
            for doc_id in sorted(lost - set(self.sources))
            if any(Path(known[doc_id]).is_relative_to(root) for root in roots)
        ]

    @property
    def doc_ids(self) -> set[str]:
        """Documents of this ingest."""
        return set(self.sources)

    def run(self, pool: WorkerPool, progress: OnProgress | None) -> None:
        """Render what is new or changed. OSError (ENOSPC) when the disk is full."""
        for doc_id in self.gone:
            self.corpus.remove(doc_id)
            self.report.removed.append(doc_id)
        todo = self._changed()
        self.corpus.save()
        count = PageCount(list(todo.values()))
        done = 0
        for doc_id, finished in self._render(todo, pool, count):
            done += finished
            if progress is not None:
                progress(Progress("render", done, len(todo), count.done, count.expected(), doc_id))
            self.corpus.save_sometimes()
        # Workers end in any order; the report has one.
        self.report.new.sort()
        self.report.failed = dict(sorted(self.report.failed.items()))
        for doc_id in self.report.new:
            self.report.notes += [f"{doc_id}: {note}" for note in self.corpus.documents[doc_id].notes]

    def _changed(self) -> dict[str, DocumentJob]:
        """The documents to render; unchanged ones are reported and keep their pages."""
        stored: dict[str, list[Page]] = {}
        for page in self.corpus.pages.values():
            stored.setdefault(page.doc_id, []).append(page)
        todo = {}
        for doc_id, source in self.sources.items():
            try:
                state = files_state(source)
                digest = source_sha256(source)
            except NotRegular as error:
                # Opening a FIFO would wait for ever. The corpus keeps what it has, as below.
                self._fail(source, "", str(error), keep=True)
                continue
            except OSError as error:
                # Nothing is known about the file's content: what the corpus has of it stays.
                self._fail(source, "", f"{_name(error, source)} cannot be read: {error.strerror}", keep=True)
                continue
            record = self.corpus.documents.get(doc_id)
            files = [self.corpus.folder / page.image for page in stored.get(doc_id, [])]
            if (
                record is not None
                and (record.status, record.sha256) == ("done", digest)
                and record.recipe == self.settings.recipe
                and all(file.is_file() for file in files)
            ):
                self.corpus.documents[doc_id] = record.model_copy(update={"source": source_of(source.path)})
                self.report.unchanged.append(doc_id)
            else:
                todo[doc_id] = DocumentJob(source, digest, state)
        return todo

    def _render(
        self, todo: dict[str, DocumentJob], pool: WorkerPool, count: PageCount
    ) -> Iterator[tuple[str, bool]]:
        """Yields (document, whether it is finished) after every chunk."""
        waiting = dict(todo)
        fresh = iter(list(todo.values()))
        more: deque[Iterator[Chunk]] = deque()

        def next_chunk() -> Chunk | None:
            while more:  # documents that were begun come first
                for chunk in more[0]:
                    if chunk.doc_id in waiting:
                        return chunk
                    break  # it has failed
                more.popleft()
            following = next(fresh, None)
            return self._first_chunk(following) if following else None

        for chunk, outcome in pool.run(next_chunk):
            assert isinstance(chunk, Chunk)
            document = waiting.get(chunk.doc_id)
            if document is None:
                continue  # an earlier chunk of the document failed
            if outcome.kind == "disk":
                raise OSError(errno.ENOSPC, outcome.error)
            error = outcome.error or self._add(document, chunk, outcome.value, more, count)
            if error:
                self._fail(document.source, document.digest, error)
            elif document.complete:
                self._finish(document, chunk.folder.name)
            finished = bool(error) or document.complete
            if finished:
                del waiting[chunk.doc_id]
                count.settle(document)
                document.chunks.clear()  # its texts are in the corpus now
            yield chunk.doc_id, finished

    def _add(
        self,
        document: DocumentJob,
        chunk: Chunk,
        reply: dict[str, Any],
        more: deque[Iterator[Chunk]],
        count: PageCount,
    ) -> str:
        """Take a chunk's pages; returns what is wrong with the document, "" for nothing."""
        rendered = rendered_pages(reply)
        document.add(chunk.first, rendered)
        if chunk.first == 1:
            more.append(chunk.following(rendered.page_count))
        count.add(document, rendered)
        if document.hopeless:
            name, pages = document.source.path.name, rendered.page_count
            return f"{name} is damaged: it claims {pages} pages, and nearly none can be read"
        return ""

    def _first_chunk(self, document: DocumentJob) -> Chunk:
        name = folder_name(document.source.doc_id, document.digest, self.settings.recipe)
        root = self.corpus.folder
        folder, journal = root / IMAGES_FOLDER / name, root / JOURNAL_FOLDER / name
        source = document.source
        return Chunk(source.doc_id, source.path, folder, journal, self.settings, pages=source.pages)

    def _finish(self, document: DocumentJob, folder: str) -> None:
        source, rendered = document.source, document.joined()
        doc_id = source.doc_id
        if document.file_changed():
            reason = f"{source.path.name} was changed while it was being read; ingest it again"
            return self._fail(source, document.digest, reason)
        notes = [legible(note) for note in joined_notes(rendered.notes)]
        if not rendered.pages:
            reason = f"{source.path.name}: none of its pages could be rendered ({'; '.join(notes)})"
            return self._fail(source, document.digest, reason)
        pages = [
            Page(
                page_id=make_page_id(doc_id, page.number),
                doc_id=doc_id,
                page_number=page.number,
                image=f"{IMAGES_FOLDER}/{folder}/{page.file_name}",
                width=page.width,
                height=page.height,
                text=page.text,
                text_source="layer" if page.text else "none",
                sha256=page.sha256,
            )
            for page in rendered.pages
        ]
        record = DocumentRecord(
            doc_id=doc_id,
            status="done",
            page_count=source.pages[-1].number if source.pages else rendered.page_count,
            notes=notes,
            sha256=document.digest,
            recipe=self.settings.recipe,
            folder=folder,
            source=source_of(source.path),
        )
        self.corpus.put(record, pages)
        self.report.new.append(doc_id)

    def _fail(self, source: Source, digest: str, reason: str, keep: bool = False) -> None:
        self.report.failed[source.doc_id] = reason = legible(reason)
        before = self.corpus.documents.get(source.doc_id)
        if not (keep and before and before.status == "done"):
            record = DocumentRecord(
                doc_id=source.doc_id,
                status="failed",
                reason=reason,
                sha256=digest,
                source=source_of(source.path),
            )
            self.corpus.put(record, [])


def source_sha256(source: Source) -> str:
    """Hash of a document: of its file, or of the numbers and files of its page images."""
    if not source.pages:
        return file_sha256(source.path)
    parts = "".join(f"{number}:{file_sha256(path)}\n" for number, path in source.pages)
    return hashlib.sha256(parts.encode()).hexdigest()


def _name(error: OSError, source: Source) -> str:
    return Path(error.filename or source.path).name


def folder_name(doc_id: str, digest: str, recipe: str) -> str:
    """Folder of a document version's images: readable, safe on any file system, and never used twice."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", doc_id)[-40:].strip("._") or "document"
    key = hashlib.sha256("\0".join([doc_id, digest, recipe]).encode()).hexdigest()[:16]
    return f"{readable}-{key}"
