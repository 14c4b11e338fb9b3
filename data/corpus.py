"""A corpus: page images, their texts and the documents they come from. `ingest` makes one."""

from __future__ import annotations

import os
from pathlib import Path

from PIL import Image

from data.corpus_files import CaptionsState, DocumentRecord, read_captions_state, read_corpus
from data.ingest import ingest, remove_documents
from data.ingest_report import IngestReport
from data.sources import normalise_id
from visor.types import Page

__all__ = ["Corpus", "DocumentRecord", "IngestReport", "ingest", "remove_documents"]


class Corpus:
    """Read access to a corpus folder; implements `visor.types.PageStore`."""

    def __init__(self, path: Path, documents: dict[str, DocumentRecord], pages: dict[str, Page]):
        self.path = path
        self._documents = documents
        self._pages = pages

    @classmethod
    def open(cls, path: str | Path) -> Corpus:
        """Open the corpus in a folder. Raises ValueError when there is none or it is damaged."""
        return cls(Path(path), *read_corpus(Path(path)))

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @property
    def captions(self) -> CaptionsState:
        """Where the captions of the pages come from."""
        return read_captions_state(self.path)

    def documents(self) -> list[DocumentRecord]:
        """Every document, failed ones too, by id."""
        return list(self._documents.values())

    def page_counts(self) -> dict[str, int]:
        """Number of pages of each document in the corpus."""
        return {d.doc_id: d.page_count for d in self._documents.values() if d.status == "done"}

    def pages(self) -> list[Page]:
        """Every page, by document, then by number."""
        return list(self._pages.values())

    def page(self, page_id: str) -> Page:
        """The page with this id, in either Unicode spelling. Raises ValueError for an unknown one."""
        page = self._pages.get(page_id) or self._pages.get(normalise_id(page_id))
        if page is None:
            raise ValueError(f"corpus {self.path} has no page {page_id!r}")
        return page

    def image(self, page_id: str) -> Image.Image:
        """The page image, RGB, at its stored size. Raises ValueError when its file is missing or damaged."""
        page = self.page(page_id)
        try:
            with Image.open(self.path / page.image) as image:
                return image.convert("RGB")
        except OSError as error:
            raise ValueError(
                f"the image of page {page_id!r} ({self.path / page.image}) cannot be read: {error}; "
                "ingest the documents again"
            ) from None

    def missing_images(self) -> list[str]:
        """Page images that are not there, by path below the corpus; lists folders and opens no file."""
        there: dict[Path, set[str]] = {}
        missing = []
        for page in self._pages.values():
            path = self.path / page.image
            if path.parent not in there:
                there[path.parent] = set(os.listdir(path.parent)) if path.parent.is_dir() else set()
            if path.name not in there[path.parent]:
                missing.append(page.image)
        return missing

    def check_images(self) -> None:
        """ValueError naming page images that are not there: found now, not hours into a run."""
        missing = self.missing_images()
        if missing:
            names = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
            raise ValueError(
                f"corpus {self.path} lacks {len(missing)} of its {len(self._pages)} page images ({names}); "
                "ingest the documents again"
            )

    def document_path(self, doc_id: str) -> Path | None:
        """The document's file as it was when ingested; None when it is no longer there."""
        record = self._documents.get(doc_id) or self._documents.get(normalise_id(doc_id))
        path = record.path if record else None
        return path if path and path.is_file() else None
