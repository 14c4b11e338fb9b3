"""The files of a corpus folder, and how they are replaced so that a kill at any moment leaves a good corpus.

    pages.parquet   one row a page, the fields of `Page`; the document table is in the file's metadata
    corpus.json     the document table again, to read; written right after
    images/         one folder a document version

Pages and documents are in one file because one rename must replace both. Images are written before the rows
that name them, into folders that no older row names, and removed after the last row that named them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from visor.types import SCHEMA_VERSION, Page, Record, page_sort_key

PAGES_FILE = "pages.parquet"
MANIFEST_FILE = "corpus.json"
IMAGES_FOLDER = "images"
_METADATA_KEY = b"visor_corpus"
_SCHEMA = pa.schema(
    [
        (name, pa.int32() if name in ("page_number", "width", "height") else pa.string())
        for name in Page.model_fields
    ]
)


class DocumentRecord(Record):
    """What a corpus knows about one document."""

    doc_id: str
    status: Literal["done", "failed"]
    reason: str = ""
    """Why it failed."""
    page_count: int = 0
    """Pages of the document; those that could not be rendered are counted here and named in `notes`."""
    notes: list[str] = []
    sha256: str = ""
    """Hash of the document file."""
    recipe: str = ""
    """How its pages were rendered."""
    folder: str = ""
    """Folder of its page images, below `images/`."""
    source: str = ""
    """Absolute path of the document file when it was ingested."""


class CaptionsState(Record):
    """Where the captions of a corpus come from."""

    source: Literal["page text", "model"] = "page text"
    """page text: no page has a caption, and what reads captions (TAEC) reads the text of the page instead.
    model: pages with a caption have it from `model`; for the others their text stands in."""
    count: int = 0
    """Pages with a caption."""
    sha256: str = ""
    """Hash of the caption file (`captions.jsonl`) that the pages' captions were taken from."""
    model: str = ""
    prompt_sha256: str = ""
    max_pixels: int = 0
    """Pixel budget at which the model saw a page."""


class CorpusManifest(Record):
    """`corpus.json`."""

    schema_version: int = SCHEMA_VERSION
    captions: CaptionsState = CaptionsState()
    documents: list[DocumentRecord] = []


def read_corpus(folder: Path) -> tuple[dict[str, DocumentRecord], dict[str, Page]]:
    """Read documents and pages, both in order. Raises ValueError when the folder holds no usable corpus."""
    path = folder / PAGES_FILE
    if not path.is_file():
        raise ValueError(f"{folder} is not a corpus: it has no {PAGES_FILE}; make one with `visor ingest`")
    try:
        table = pq.read_table(path)
        raw = json.loads((table.schema.metadata or {})[_METADATA_KEY])
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise ValueError(f"{path} is damaged or was not written by `visor ingest`: {error}") from None
    if raw.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema version {raw.get('schema_version')}, this program reads {SCHEMA_VERSION}; "
            "ingest the documents again into a new folder"
        )
    documents = CorpusManifest.model_validate(raw).documents
    pages = [Page.model_validate(row) for row in table.to_pylist()]
    return {d.doc_id: d for d in documents}, {p.page_id: p for p in pages}


def read_captions_state(folder: Path) -> CaptionsState:
    """Where a corpus's captions come from; the default when there is no corpus yet."""
    path = folder / PAGES_FILE
    if not path.is_file():
        return CaptionsState()
    raw = json.loads((pq.read_schema(path).metadata or {})[_METADATA_KEY])
    return CorpusManifest.model_validate(raw).captions


def write_corpus(
    folder: Path,
    documents: dict[str, DocumentRecord],
    pages: dict[str, Page],
    captions: CaptionsState | None = None,
) -> None:
    """Replace a corpus's documents and pages in one step.

    `captions` says where the pages' captions come from (None: as before); the count is taken from the pages.
    """
    captions = captions or read_captions_state(folder)
    count = sum(bool(page.caption) for page in pages.values())
    captions = captions.model_copy(update={"count": count}) if count else CaptionsState()
    manifest = CorpusManifest(
        captions=captions, documents=[documents[doc_id] for doc_id in sorted(documents)]
    )
    rows = [pages[page_id].model_dump() for page_id in sorted(pages, key=page_sort_key)]
    schema = _SCHEMA.with_metadata({_METADATA_KEY: manifest.model_dump_json().encode()})
    table = pa.Table.from_pylist(rows, schema=schema)
    with atomic_file(folder / PAGES_FILE) as temporary:
        pq.write_table(table, temporary)
    with atomic_file(folder / MANIFEST_FILE) as temporary:
        temporary.write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Give a temporary path to write; afterwards flush it to disk and rename it to `path`."""
    temporary = path.with_name(f".{path.name}.tmp")
    yield temporary
    with temporary.open("rb") as stream:
        os.fsync(stream.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries (renames, new files) to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
