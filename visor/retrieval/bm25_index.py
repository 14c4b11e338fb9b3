"""BM25's files: made anew by every build, in a folder of their own, and named by a manifest replaced last."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from visor.files import sync_tree, write_atomically
from visor.retrieval.bm25 import BM25Retriever
from visor.retrieval.content import (
    check_corpus,
    check_owner,
    corpus_hash,
    corpus_name,
    index_command,
    rebuild_hint,
)
from visor.retrieval.disk import FileRecord, build_lock, difference, file_record
from visor.retrieval.report import BuildReport, Progress
from visor.types import SCHEMA_VERSION, PageStore, Record

MANIFEST_FILE = "manifest.json"
RETRIEVER = "bm25"


class BM25Manifest(Record):
    """`manifest.json`."""

    schema_version: int = SCHEMA_VERSION
    retriever: str
    settings: dict[str, str]
    """What decides a ranking beside the corpus: an index with other settings is refused."""
    corpus: str
    """Name of the corpus."""
    corpus_hash: str
    page_count: int
    libraries: dict[str, str]
    files: str
    """Folder of the index files, below the index folder."""
    hashes: dict[str, FileRecord] = {}
    """Each file of that folder by name; none in an index of an earlier version, which is not opened."""


class BM25Index:
    """Builds and opens the index folder of `bm25`."""

    @classmethod
    def build(
        cls,
        corpus: PageStore,
        path: str | Path,
        *,
        progress: Progress | None = None,
        replace: bool = False,
    ) -> BuildReport:
        """Index a corpus into a folder, in place of what is there.

        Raises ValueError, and leaves the folder as it was, for a corpus without pages or without a word, and
        for a folder that holds the index of a corpus with another name (unless `replace`).
        """
        started = time.perf_counter()
        path = Path(path)
        pages = corpus.pages()
        if not pages:
            raise ValueError(f"{corpus_name(corpus)} has no pages; there is nothing to index")
        with build_lock(path):
            if not replace:
                check_owner(path, _previous(path), corpus)
            files = path / f"files-{uuid.uuid4().hex[:12]}"
            files.mkdir()
            try:
                BM25Retriever.build(pages).save(files)
            except ValueError:
                files.rmdir()  # of a corpus without a word
                raise
            sync_tree(files)
            manifest = BM25Manifest(
                retriever=RETRIEVER,
                settings=BM25Retriever.settings(),
                corpus=corpus_name(corpus),
                corpus_hash=corpus_hash(pages),
                page_count=len(pages),
                libraries=BM25Retriever.libraries(),
                files=files.name,
                hashes={file.name: file_record(file) for file in sorted(files.iterdir())},
            )
            write_atomically(path / MANIFEST_FILE, manifest.model_dump_json(indent=1) + "\n")
            for old in path.glob("files-*"):
                if old != files:
                    shutil.rmtree(old)
        if progress:
            progress(len(pages), len(pages))
        return BuildReport(
            retriever=RETRIEVER,
            corpus=manifest.corpus,
            path=str(path),
            page_count=len(pages),
            empty=[page.page_id for page in pages if not f"{page.text}{page.caption}".strip()],
            seconds=time.perf_counter() - started,
            bytes_on_disk=sum(file.stat().st_size for file in files.iterdir()),
        )

    @classmethod
    def open(cls, path: str | Path, corpus: PageStore) -> BM25Retriever:
        """Raises ValueError, saying which is which and to rebuild, for no or a damaged index, for another
        corpus or state of it, and for other settings. Every file is compared with its hash: damage that
        still reads would change rankings silently."""
        path = Path(path)
        manifest = read_bm25_manifest(path, corpus)
        rebuild = rebuild_hint(path, manifest, corpus)
        if manifest.settings != BM25Retriever.settings():
            raise ValueError(
                f"the index {path} was made with {manifest.settings}, "
                f"this program uses {BM25Retriever.settings()}; {rebuild}"
            )
        check_corpus(path, manifest, corpus)
        for problem in _problems(path, manifest, rebuild):
            raise ValueError(f"the index {path} is damaged: {problem}; {rebuild}")
        try:
            return BM25Retriever.load(path / manifest.files)
        except (OSError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"the index {path} is damaged ({error}); {rebuild}") from None


def has_bm25(path: str | Path) -> bool:
    return (Path(path) / MANIFEST_FILE).is_file()


def read_bm25_manifest(path: str | Path, corpus: PageStore | None = None) -> BM25Manifest:
    """Read an index's manifest. Raises ValueError when there is none, it is damaged or of another version;
    what to do then names the `corpus`."""
    path = Path(path)
    file = path / MANIFEST_FILE
    if not file.is_file():
        raise ValueError(f"{path} holds no index; make one with `visor index CORPUS`")
    rebuild = index_command(path, corpus, RETRIEVER)
    try:
        manifest = BM25Manifest.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise ValueError(
            f"{file} is not an index manifest ({error.errors()[0]['msg']}); rebuild the index with {rebuild}"
        ) from None
    if manifest.schema_version != SCHEMA_VERSION:
        raise ValueError(
            f"{file} has schema version {manifest.schema_version}, this program reads {SCHEMA_VERSION}; "
            f"rebuild the index with {rebuild}"
        )
    return manifest


def verify_bm25(path: str | Path) -> list[str]:
    """Read every file and name, a sentence each, those whose hash is not the manifest's. ValueError when
    there is no manifest to compare with."""
    path = Path(path)
    manifest = read_bm25_manifest(path)
    rebuild = rebuild_hint(path, manifest, None)
    return [f"{problem}; {rebuild}" for problem in _problems(path, manifest, rebuild)]


def _problems(path: Path, manifest: BM25Manifest, rebuild: str) -> Iterator[str]:
    """What is wrong with each file. ValueError for an index of an earlier version."""
    if not manifest.hashes:
        raise ValueError(f"the index {path} was made before files had hashes in its manifest; {rebuild}")
    for name, record in manifest.hashes.items():
        file = path / manifest.files / name
        if problem := difference(file, record):
            yield f"{file} {problem}"


def _previous(path: Path) -> BM25Manifest | None:
    """The manifest of the index that is there; None when there is none or it is damaged."""
    try:
        return read_bm25_manifest(path) if has_bm25(path) else None
    except ValueError:
        return None
