"""Build an index of a corpus, and open it again only for the corpus and retriever it was made with.

An index folder holds one folder of files for each build and `manifest.json`, which names the current one and
is replaced last: a killed build leaves the index before it in service.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from visor.retrieval.base import Retriever
from visor.retrieval.opening import is_remote, open_remote
from visor.types import SCHEMA_VERSION, Page, PageStore, Record

MANIFEST_FILE = "manifest.json"
DEFAULT_RETRIEVER = "bm25"


class IndexedRetriever(Retriever, Protocol):
    """A retriever whose index is kept on disk."""

    @classmethod
    def build(cls, pages: Sequence[Page]) -> IndexedRetriever: ...

    @classmethod
    def load(cls, folder: Path) -> IndexedRetriever: ...

    def save(self, folder: Path) -> None: ...

    @staticmethod
    def settings() -> dict[str, str]:
        """What decides a ranking beside the corpus: an index with other settings is refused."""
        ...

    @staticmethod
    def libraries() -> dict[str, str]:
        """Versions recorded in the manifest."""
        ...


def _bm25() -> Any:
    from visor.retrieval.bm25 import BM25Retriever

    return BM25Retriever


RETRIEVERS: dict[str, Callable[[], Any]] = {"bm25": _bm25}
"""Name → function that imports and returns an IndexedRetriever class, so that its libraries load late."""


class IndexManifest(Record):
    """`manifest.json` of an index."""

    schema_version: int = SCHEMA_VERSION
    retriever: str
    settings: dict[str, str]
    corpus: str
    """Name of the corpus."""
    corpus_hash: str
    page_count: int
    libraries: dict[str, str]
    files: str
    """Folder of the index files, below the index folder."""


def default_index_path(corpus_path: str | Path, retriever: str = DEFAULT_RETRIEVER) -> Path:
    """`CORPUS/index/RETRIEVER`."""
    return Path(corpus_path) / "index" / retriever


def corpus_hash(pages: Sequence[Page]) -> str:
    """SHA-256 over ids, images and texts of the pages, in order."""
    digest = hashlib.sha256()
    for page in pages:
        for part in (page.page_id, page.sha256, page.text, page.caption):
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
    return digest.hexdigest()


def build_index(corpus: PageStore, path: str | Path, retriever: str = DEFAULT_RETRIEVER) -> IndexManifest:
    """Index a corpus into the folder `path`, in place of what is there.

    Raises ValueError for an unknown retriever and for a corpus without pages.
    """
    retriever_class = _retriever_class(retriever)
    pages = corpus.pages()
    if not pages:
        raise ValueError(f"{_name(corpus)} has no pages; there is nothing to index")
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    files = path / f"files-{uuid.uuid4().hex[:12]}"
    files.mkdir()
    retriever_class.build(pages).save(files)
    _sync(files)
    manifest = IndexManifest(
        retriever=retriever,
        settings=retriever_class.settings(),
        corpus=_name(corpus),
        corpus_hash=corpus_hash(pages),
        page_count=len(pages),
        libraries=retriever_class.libraries(),
        files=files.name,
    )
    _write_manifest(path, manifest)
    for old in path.glob("files-*"):
        if old != files:
            shutil.rmtree(old)
    return manifest


def open_index(path: str | Path, corpus: PageStore, retriever: str | None = None) -> Retriever:
    """Open the index in `path`, a folder or the address of a service, for a corpus.

    Raises ValueError, saying which is which and to rebuild, when there is no index, or when it was made for
    another corpus or state of it, by another retriever than `retriever` (None: any), or with other settings.
    """
    if is_remote(path):
        return open_remote(str(path), corpus, retriever)
    path = Path(path)
    manifest = read_manifest(path)
    rebuild = f"rebuild it with `visor index {getattr(corpus, 'path', 'CORPUS')}`"
    if retriever is not None and retriever != manifest.retriever:
        raise ValueError(f"the index {path} was made by {manifest.retriever!r}, not {retriever!r}; {rebuild}")
    retriever_class = _retriever_class(manifest.retriever)
    if manifest.settings != retriever_class.settings():
        raise ValueError(
            f"the index {path} was made with {manifest.settings}, "
            f"this program uses {retriever_class.settings()}; {rebuild}"
        )
    pages = corpus.pages()
    if manifest.corpus_hash != corpus_hash(pages):
        raise ValueError(
            f"the index {path} was made for corpus {manifest.corpus!r} with {manifest.page_count} pages, "
            f"which is not {_name(corpus)!r} as it is now ({len(pages)} pages); {rebuild}"
        )
    try:
        return retriever_class.load(path / manifest.files)
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"the index {path} is damaged ({error}); {rebuild}") from None


def read_manifest(path: str | Path) -> IndexManifest:
    """Read an index's manifest. Raises ValueError when there is none or it is of another version."""
    file = Path(path) / MANIFEST_FILE
    if not file.is_file():
        raise ValueError(f"{path} holds no index; make one with `visor index CORPUS`")
    try:
        manifest = IndexManifest.model_validate_json(file.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise ValueError(f"{file} is not an index manifest: {error.errors()[0]['msg']}") from None
    if manifest.schema_version != SCHEMA_VERSION:
        raise ValueError(
            f"{file} has schema version {manifest.schema_version}, this program reads {SCHEMA_VERSION}; "
            "rebuild the index"
        )
    return manifest


def _retriever_class(name: str) -> Any:
    if name not in RETRIEVERS:
        raise ValueError(f"unknown retriever {name!r}; known: {', '.join(sorted(RETRIEVERS))}")
    return RETRIEVERS[name]()


def _name(corpus: PageStore) -> str:
    return str(getattr(corpus, "name", "corpus"))


def _write_manifest(path: Path, manifest: IndexManifest) -> None:
    temporary = path / f".{MANIFEST_FILE}.tmp"
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(manifest.model_dump_json(indent=1) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path / MANIFEST_FILE)


def _sync(folder: Path) -> None:
    for file in [*folder.iterdir(), folder]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
