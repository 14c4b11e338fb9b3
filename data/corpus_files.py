"""The files of a corpus folder, and how they are replaced so that a kill at any moment leaves a good corpus.

    pages.parquet   one row a page, the fields of `Page`; the document table is in the file's metadata
    corpus.json     the document table again, to read; written right after
    images/         one folder a document version
    journal/        what a running or killed ingest has done since pages.parquet was written; else absent

Pages and documents are in one file because one rename must replace both: `pages.parquet` decides, and a kill
between the two renames leaves a `corpus.json` that the next ingest writes again. Images are written before
the rows that name them, into folders that no older row names, and removed after the last row that named them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal
from urllib.parse import unquote_to_bytes

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from visor.files import atomic_file
from visor.types import SCHEMA_VERSION, Page, Record, page_sort_key

PAGES_FILE = "pages.parquet"
MANIFEST_FILE = "corpus.json"
IMAGES_FOLDER = "images"
JOURNAL_FOLDER = "journal"
EXTRACTED_FOLDER = Path("sources", "slidevqa")
"""Where the slides of SlideVQA's rows are written: documents are files."""
OCR_JOURNAL = "ocr.jsonl"
"""In the journal: the texts of pages read by OCR."""
_METADATA_KEY = b"visor_corpus"
_URI = "file://"
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
    ocr: str = ""
    """Engine and version that read its pages without a text layer; "" = none of them was read."""
    folder: str = ""
    """Folder of its page images, below `images/`."""
    source: str = ""
    """Absolute path of the document file when it was ingested; a file: URI where the path is no UTF-8."""

    @property
    def path(self) -> Path:
        """`source` as the path that it stands for."""
        if self.source.startswith(_URI):
            return Path(os.fsdecode(unquote_to_bytes(self.source.removeprefix(_URI))))
        return Path(self.source)


def source_of(path: Path) -> str:
    """An absolute path as a document's `source`: text that any reader of the corpus can decode."""
    text = str(path)
    return text if legible(text) == text else path.as_uri()


def legible(text: str) -> str:
    """Text with the bytes of a file name that are no UTF-8 escaped, so that it can be stored and printed."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


class CorpusTotals(Record):
    """Counts over all pages."""

    pages: int = 0
    pages_without_text: int = 0
    """Neither a text layer nor OCR gave any; text retrieval finds them by their caption only."""
    pages_read_by_ocr: int = 0


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
    totals: CorpusTotals = CorpusTotals()
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
    try:
        documents = CorpusManifest.model_validate(raw).documents
        pages = [Page.model_validate(row) for row in table.to_pylist()]
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(str(part) for part in problem["loc"])
        raise ValueError(
            f"{path} was written by another version of this program ({field}: {problem['msg']}); "
            "update the program, or ingest the documents again into a new folder"
        ) from None
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
    manifest = CorpusManifest(
        totals=count_pages(pages.values()),
        captions=captions.model_copy(update={"count": count}) if count else CaptionsState(),
        documents=[documents[doc_id] for doc_id in sorted(documents)],
    )
    rows = [pages[page_id].model_dump() for page_id in sorted(pages, key=page_sort_key)]
    schema = _SCHEMA.with_metadata({_METADATA_KEY: manifest.model_dump_json().encode()})
    table = pa.Table.from_pylist(rows, schema=schema)
    with atomic_file(folder / PAGES_FILE) as temporary:
        pq.write_table(table, temporary)
    with atomic_file(folder / MANIFEST_FILE) as temporary:
        temporary.write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")


def count_pages(pages: Iterable[Page]) -> CorpusTotals:
    """The totals of a corpus."""
    totals = CorpusTotals()
    for page in pages:
        totals.pages += 1
        totals.pages_without_text += not page.text
        totals.pages_read_by_ocr += page.text_source == "ocr"
    return totals
