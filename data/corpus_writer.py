"""A corpus being changed: its pages and documents in memory, saved now and then, by one process at a time."""

from __future__ import annotations

import fcntl
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from data.corpus_files import (
    IMAGES_FOLDER,
    JOURNAL_FOLDER,
    OCR_JOURNAL,
    PAGES_FILE,
    DocumentRecord,
    read_corpus,
    write_corpus,
)
from visor.types import Page, make_page_id

SAVE_SECONDS = 20.0
"""Least time between two saves of a running job."""
SAVE_SHARE = 20
"""A save is followed by at least this many times its own duration of work."""
LOCK_SECONDS = 2.0
"""How long to wait for the workers of a killed ingest to end."""
_VERSION_FOLDER = re.compile(r".*-[0-9a-f]{16}")
_CHUNK_ENTRY = re.compile(r"\d{5,}\.json|\.\d{5,}\.json\.tmp")


class CorpusWriter:
    """The documents and pages of a corpus folder, which need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.documents: dict[str, DocumentRecord] = {}
        self.pages: dict[str, Page] = {}
        if (folder / PAGES_FILE).exists():
            self.documents, self.pages = read_corpus(folder)
        self._next_save = time.monotonic() + SAVE_SECONDS

    def put(self, record: DocumentRecord, pages: list[Page]) -> None:
        """Set a document and its pages, in place of those it had; an unchanged picture keeps its caption."""
        captions = {
            page.sha256: page.caption
            for page in self._pages_of(record.doc_id)
            if page.sha256 and page.caption
        }
        self.remove(record.doc_id)
        self.documents[record.doc_id] = record
        for page in pages:
            caption = page.caption or captions.get(page.sha256, "")
            self.pages[page.page_id] = page.model_copy(update={"caption": caption})

    def remove(self, doc_id: str) -> None:
        """Take a document and its pages out, if it is there."""
        for page in self._pages_of(doc_id):
            del self.pages[page.page_id]
        self.documents.pop(doc_id, None)

    def _pages_of(self, doc_id: str) -> list[Page]:
        record = self.documents.get(doc_id)
        ids = (make_page_id(doc_id, number) for number in range(1, record.page_count + 1 if record else 1))
        return [self.pages[page_id] for page_id in ids if page_id in self.pages]

    def save(self) -> None:
        """Write the corpus; a reader sees it as it was before or as it is now."""
        started = time.monotonic()
        write_corpus(self.folder, self.documents, self.pages)
        ended = time.monotonic()
        self._next_save = ended + max(SAVE_SECONDS, SAVE_SHARE * (ended - started))

    def save_sometimes(self) -> None:
        """Save when the last time is long enough ago."""
        if time.monotonic() > self._next_save:
            self.save()

    def clean(self) -> None:
        """Remove the journal, and page images that no document names. Call it after a save."""
        _clean_journal(self.folder / JOURNAL_FOLDER)
        used = {record.folder for record in self.documents.values()}
        for folder in (self.folder / IMAGES_FOLDER).iterdir():
            if folder.name not in used and _VERSION_FOLDER.fullmatch(folder.name) and folder.is_dir():
                shutil.rmtree(folder)


def _clean_journal(journal: Path) -> None:
    """Remove what an ingest writes to a journal, and its folders where nothing else lies in them."""
    if not journal.is_dir():
        return
    for folder in journal.iterdir():
        if _VERSION_FOLDER.fullmatch(folder.name) and folder.is_dir():
            for entry in folder.iterdir():
                if _CHUNK_ENTRY.fullmatch(entry.name):
                    entry.unlink()
            _remove_empty(folder)
    (journal / OCR_JOURNAL).unlink(missing_ok=True)
    _remove_empty(journal)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # it holds files of the user
        folder.rmdir()


@contextmanager
def only_one(folder: Path) -> Iterator[int]:
    """Hold a corpus's lock and give its descriptor.

    The system releases the lock when the last process that has the descriptor ends, however it ends. Worker
    processes get it too: those of a killed ingest write until they notice, and the next one waits for them.
    """
    try:
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise ValueError(f"the corpus {folder} cannot be written: {error.strerror}") from None
    with lock as stream:
        give_up = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise ValueError(f"another ingest is working on {folder}; wait for it to end") from None
                time.sleep(0.05)
        yield stream.fileno()
