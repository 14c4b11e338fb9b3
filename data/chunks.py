"""A few pages of a document at a time, each chunk kept in a journal once its pages are on disk.

The journal is what a killed ingest continues from: a document of 1,000 pages does not start again at page 1.

    journal/FOLDER/00017.json    pages 17 to 24 of the document whose images are in images/FOLDER

An entry is written after the images it names are flushed to disk; it is removed with the whole journal when
the pages are in the corpus.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from data.images import PageFile
from data.render import RenderedPage, RenderedPages, RenderSettings, copy_page_files, render_document
from visor.files import atomic_file, sync_folder

CHUNK_PAGES = 8
"""Large enough that opening the file costs little, small enough that the workers end at the same time."""


@dataclass(frozen=True)
class Chunk:
    """Pages `first` … `first + CHUNK_PAGES − 1` of a document; a task of the worker pool."""

    doc_id: str
    path: Path
    folder: Path
    """Of the page images; made when it is absent."""
    journal: Path
    """Of the document's journal entries; made when it is absent."""
    settings: RenderSettings
    first: int = 1
    pages: tuple[PageFile, ...] = ()
    """The images of a document that is a group of them; `first` then counts these, not page numbers."""

    @property
    def name(self) -> str:
        return f"{self.path.name}, pages {self.first}-{self.first + CHUNK_PAGES - 1}"

    def request(self) -> dict[str, Any]:
        """The chunk as JSON, for a worker."""
        return {
            "task": "render",
            "path": str(self.path),
            "folder": str(self.folder),
            "journal": str(self.journal),
            "settings": asdict(self.settings),
            "first": self.first,
            "pages": [(number, str(path)) for number, path in self.pages],
        }

    def following(self, page_count: int) -> Iterator[Chunk]:
        """The chunks after this one, of a document of so many pages."""
        for first in range(self.first + CHUNK_PAGES, page_count + 1, CHUNK_PAGES):
            yield replace(self, first=first)


def count_chunks(page_count: int) -> int:
    """Chunks that a document of so many pages is cut into."""
    return -(-page_count // CHUNK_PAGES)


def run_chunk(request: dict[str, Any]) -> dict[str, Any]:
    """Render a chunk, or take it from the journal; the reply to `Chunk.request`.

    Raises DocumentError when the document cannot be used, OSError when its file cannot be read or the images
    cannot be written.
    """
    folder, journal = Path(request["folder"]), Path(request["journal"])
    entry = journal / f"{request['first']:05d}.json"
    kept = _read_entry(entry, folder)
    if kept is not None:
        return kept
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
    settings = RenderSettings(**request["settings"])
    pages = [PageFile(number, Path(path)) for number, path in request["pages"]]
    span = (folder, settings, request["first"], CHUNK_PAGES)
    rendered = copy_page_files(pages, *span) if pages else render_document(Path(request["path"]), *span)
    for page in rendered.pages:
        _sync(folder / page.file_name)
    sync_folder(folder)
    journal.mkdir(parents=True, exist_ok=True)
    reply = asdict(rendered)
    with atomic_file(entry) as temporary:
        temporary.write_text(json.dumps(reply), encoding="utf-8")
    return reply


def rendered_pages(reply: dict[str, Any]) -> RenderedPages:
    """The reply of a worker as what it stands for."""
    return RenderedPages(
        page_count=reply["page_count"],
        pages=[RenderedPage(**page) for page in reply["pages"]],
        notes=[(number, text) for number, text in reply["notes"]],
    )


def _read_entry(entry: Path, folder: Path) -> dict[str, Any] | None:
    try:
        reply = json.loads(entry.read_text(encoding="utf-8"))
        there = all((folder / page["file_name"]).is_file() for page in reply["pages"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return reply if there else None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
