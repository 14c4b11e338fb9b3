"""Second stage of an ingest: pages without a text layer are read by OCR, from their stored images.

A page takes seconds, so each text is kept at once, in `journal/ocr.jsonl`, under the hash of its image and
the engine's version; an image is read once even when it is a page of several documents.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from data.corpus_files import JOURNAL_FOLDER, OCR_JOURNAL
from data.corpus_writer import CorpusWriter
from data.ingest_report import IngestReport, OnProgress, Progress
from data.ocr import INSTALL, ocr_version
from data.workers import WorkerPool
from visor.types import Page, page_sort_key

Ocr = Literal["auto", "on", "off"]


def usable_engine(ocr: Ocr) -> str | None:
    """The engine to read pages with; None = do not. ValueError when it is "on" and not installed."""
    if ocr not in ("auto", "on", "off"):
        raise ValueError(f"ocr must be auto, on or off, got {ocr!r}")
    engine = None if ocr == "off" else ocr_version()
    if ocr == "on" and engine is None:
        raise ValueError(f"OCR is not installed; install it with {INSTALL}, or use --ocr off")
    return engine


@dataclass(frozen=True)
class ReadTask:
    """One page image to read."""

    image: Path
    sha256: str
    page_id: str

    @property
    def name(self) -> str:
        return self.page_id

    def request(self) -> dict[str, Any]:
        return {"task": "read", "path": str(self.image)}


def read_pages(
    corpus: CorpusWriter,
    doc_ids: set[str],
    engine: str,
    pool: WorkerPool,
    report: IngestReport,
    progress: OnProgress | None = None,
    required: bool = False,
) -> None:
    """Read the pages of these documents that have no text and were not read before.

    A page that cannot be read is noted in the report and stays without text. When the engine does not start,
    that is a note too, or a ValueError where OCR is `required`.
    """
    texts = _KnownTexts(corpus, engine)
    unread: dict[str, list[Page]] = {}
    for page in sorted(corpus.pages.values(), key=lambda page: page_sort_key(page.page_id)):
        if page.doc_id in doc_ids and page.text_source == "none" and not page.text:
            unread.setdefault(page.sha256, []).append(page)
    for digest in [digest for digest in unread if digest in texts.known]:
        _set_text(corpus, unread.pop(digest), texts.known[digest], engine)
    counter = _Counter(unread)
    tasks = iter([_task(corpus, pages[0]) for pages in unread.values()])
    for task, outcome in pool.run(lambda: next(tasks, None)):
        assert isinstance(task, ReadTask)
        pages = unread[task.sha256]
        if outcome.kind == "engine":
            if required:
                raise ValueError(outcome.error)
            report.notes.append(f"{outcome.error}; pages without a text layer stay without text")
            return
        if outcome.error:
            report.notes.append(f"{task.page_id}: OCR failed: {outcome.error}")
        else:
            texts.keep(task.sha256, outcome.value)
            _set_text(corpus, pages, outcome.value, engine)
            report.read += len(pages)
        counter.add(pages)
        if progress is not None:
            progress(counter.progress(pages[0].doc_id))
        corpus.save_sometimes()


def _task(corpus: CorpusWriter, page: Page) -> ReadTask:
    return ReadTask(corpus.folder / page.image, page.sha256, page.page_id)


def _set_text(corpus: CorpusWriter, pages: list[Page], text: str, engine: str) -> None:
    for page in pages:
        update = {"text": text, "text_source": "ocr"}
        corpus.pages[page.page_id] = page.model_copy(update=update)
        record = corpus.documents[page.doc_id]
        corpus.documents[page.doc_id] = record.model_copy(update={"ocr": engine})


class _KnownTexts:
    """Texts that this engine has read: in the corpus as it was saved last, and since then."""

    def __init__(self, corpus: CorpusWriter, engine: str) -> None:
        self._engine = engine
        self._journal = corpus.folder / JOURNAL_FOLDER / OCR_JOURNAL
        self.known = {
            page.sha256: page.text
            for page in corpus.pages.values()
            if page.text_source == "ocr" and corpus.documents[page.doc_id].ocr == engine
        }
        self.known |= dict(self._read_journal())

    def keep(self, digest: str, text: str) -> None:
        self._journal.parent.mkdir(exist_ok=True)
        line = json.dumps({"sha256": digest, "ocr": self._engine, "text": text})
        with self._journal.open("a", encoding="ascii") as stream:
            stream.write(f"\n{line}\n")  # a torn line before it stays apart
            stream.flush()
            os.fsync(stream.fileno())

    def _read_journal(self) -> Iterator[tuple[str, str]]:
        if not self._journal.is_file():
            return
        for line in self._journal.read_bytes().splitlines():
            try:
                entry = json.loads(line)
                if entry["ocr"] == self._engine:
                    yield entry["sha256"], entry["text"]
            except (ValueError, KeyError, TypeError):
                continue  # empty, or torn by a kill


class _Counter:
    def __init__(self, unread: dict[str, list[Page]]) -> None:
        self._left: dict[str, int] = {}
        for pages in unread.values():
            for page in pages:
                self._left[page.doc_id] = self._left.get(page.doc_id, 0) + 1
        self._documents, self._pages, self._done = len(self._left), sum(self._left.values()), 0

    def add(self, pages: list[Page]) -> None:
        self._done += len(pages)
        for page in pages:
            self._left[page.doc_id] -= 1

    def progress(self, doc_id: str) -> Progress:
        documents = sum(not left for left in self._left.values())
        return Progress("read", documents, self._documents, self._done, self._pages, doc_id)
