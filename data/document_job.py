"""A document being rendered, and how many pages such documents make."""

from __future__ import annotations

import stat
from dataclasses import dataclass, field

from data.chunks import CHUNK_PAGES, count_chunks
from data.render import RenderedPages, is_pdf
from data.sources import Source

FilesState = tuple[tuple[int, int, int], ...]
"""(bytes, time of change, inode) of each file of a document."""
MANY_LOST = 1000
"""So many pages of a document may be unreadable before it is given up, if few are readable."""


@dataclass
class DocumentJob:
    """A document to render, and the chunks that are done."""

    source: Source
    digest: str
    """Hash of its files."""
    state: FilesState
    """Of its files when they were hashed."""
    chunks: dict[int, RenderedPages] = field(default_factory=dict)
    """By first page; they come in any order."""
    rendered: int = 0
    """Pages that could be rendered."""

    def add(self, first: int, chunk: RenderedPages) -> None:
        self.chunks[first] = chunk
        self.rendered += len(chunk.pages)

    @property
    def page_count(self) -> int | None:
        """None until a chunk is done."""
        return next(iter(self.chunks.values())).page_count if self.chunks else None

    @property
    def complete(self) -> bool:
        return self.page_count is not None and len(self.chunks) >= count_chunks(self.page_count)

    @property
    def hopeless(self) -> bool:
        """True when nearly none of many pages can be read: a damaged file may claim a million pages."""
        lost = CHUNK_PAGES * (len(self.chunks) - 1) - self.rendered
        return lost > MANY_LOST and lost > 10 * self.rendered

    def joined(self) -> RenderedPages:
        """All chunks, pages in order."""
        chunks = [self.chunks[first] for first in sorted(self.chunks)]
        return RenderedPages(
            page_count=chunks[0].page_count,
            pages=[page for chunk in chunks for page in chunk.pages],
            notes=[note for chunk in chunks for note in chunk.notes],
        )

    def file_changed(self) -> bool:
        """True when a file is no longer the one that was hashed."""
        try:
            return files_state(self.source) != self.state
        except (OSError, NotRegular):
            return True

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(size for size, *_ in self.state)


class NotRegular(ValueError):
    """A FIFO, socket or device under the name of a document."""


def files_state(source: Source) -> FilesState:
    """What changes when a file of a document does. OSError when one is gone, NotRegular for a FIFO."""
    stats = []
    for path in [page.path for page in source.pages] or [source.path]:
        stats.append(path.stat())
        if not stat.S_ISREG(stats[-1].st_mode):
            raise NotRegular(f"{path.name} is not a regular file")
    return tuple((found.st_size, found.st_mtime_ns, found.st_ino) for found in stats)


class PageCount:
    """Pages done and expected: those of documents that were opened, and a guess by file size for the rest."""

    def __init__(self, jobs: list[DocumentJob]) -> None:
        self.done = 0
        self._known = {
            job.source.doc_id: len(job.source.pages) or 1 for job in jobs if not is_pdf(job.source.path)
        }
        self._unopened = {job.source.doc_id: job.size for job in jobs if job.source.doc_id not in self._known}
        self._bytes = self._pages = 0

    def add(self, job: DocumentJob, chunk: RenderedPages) -> None:
        """Count a chunk that is done."""
        doc_id = job.source.doc_id
        self.done += len(chunk.pages)
        self._known[doc_id] = chunk.page_count
        if doc_id in self._unopened:
            self._bytes += self._unopened.pop(doc_id)
            self._pages += chunk.page_count

    def settle(self, job: DocumentJob) -> None:
        """Count a document that is finished or has failed with the pages it gave."""
        self._unopened.pop(job.source.doc_id, None)
        self._known[job.source.doc_id] = job.rendered

    def expected(self) -> int:
        rate = self._pages / self._bytes if self._bytes else 0.0
        return sum(self._known.values()) + round(rate * sum(self._unopened.values()))
