"""Which files become documents, and under which ids."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from data.corpus_files import EXTRACTED_FOLDER, IMAGES_FOLDER, JOURNAL_FOLDER, MANIFEST_FILE, legible
from data.images import IMAGE_SUFFIXES, PageFile

DOCUMENT_SUFFIXES = IMAGE_SUFFIXES | {".pdf"}
OWN_FOLDERS = (IMAGES_FOLDER, JOURNAL_FOLDER, EXTRACTED_FOLDER)
"""Folders of a corpus that its own ingest writes to."""


Found = tuple[str, Path]
"""Path below the folder that the user named (or the file's name), and the file, absolute."""


class PageGroup(NamedTuple):
    """A document that is a group of page images."""

    name: str
    """The id, unless another document has it."""
    path: Path
    """The first of its images, absolute."""
    pages: tuple[PageFile, ...]
    """By number; at least one."""


Layout = Callable[[Sequence[str | Path], Path | None], Sequence[Found | PageGroup]]
"""How documents lie on disk: (paths of the user, folder to leave out) → documents. `find_sources` is one."""


@dataclass(frozen=True)
class Source:
    """A document to ingest."""

    doc_id: str
    path: Path
    """Absolute."""
    pages: tuple[PageFile, ...] = ()
    """As in `PageGroup`; () for a file of its own."""


def normalise_id(text: str) -> str:
    """NFC, so that both spellings of an umlaut name the same document; bytes that are no text are escaped."""
    return unicodedata.normalize("NFC", legible(text))


def find_sources(paths: Sequence[str | Path], skip: Path | None = None) -> list[Found]:
    """List every PDF and image below `paths`, each file once.

    A folder is searched with its subfolders; hidden files and folders, corpora (their page images are no
    documents) and the folder `skip` are left out. A file named by the user is taken whatever its suffix.
    Raises ValueError for a path that does not exist, is a corpus, is the folder `skip`, or lies where an
    ingest into `skip` writes.
    """
    found: dict[Path, str] = {}
    for given in paths:
        root = Path(os.path.abspath(given))
        _refuse_corpus(root, given, skip)
        if root.is_dir():
            for path in _walk(root, Path(os.path.abspath(skip)) if skip else None):
                found.setdefault(path, normalise_id(path.relative_to(root).as_posix()))
        elif root.exists():
            found.setdefault(root, normalise_id(root.name))
        else:
            raise ValueError(f"{given}: no such file or folder")
    return [(name, path) for path, name in found.items()]


def _refuse_corpus(root: Path, given: str | Path, skip: Path | None) -> None:
    if skip and root.resolve() == Path(skip).resolve():
        raise ValueError(
            f"{given} is both the folder of the documents and the output; give the corpus a folder of "
            f"its own, for example {Path(given, 'corpus')}"
        )
    if skip and any(root.resolve().is_relative_to(Path(skip, name).resolve()) for name in OWN_FOLDERS):
        raise ValueError(
            f"{given} lies in the output {skip} itself, among what an ingest writes there; name the "
            "documents that the corpus is made of, or give the new corpus another folder"
        )
    if _is_corpus(root):
        raise ValueError(
            f"{given} is a corpus (it has a {MANIFEST_FILE}), not documents; name those it was made of"
        )


def _is_corpus(folder: Path) -> bool:
    return (folder / MANIFEST_FILE).is_file()


def _walk(root: Path, skip: Path | None) -> list[Path]:
    files = []
    for folder, subfolders, names in os.walk(root):
        visible = [Path(folder, name) for name in subfolders if not name.startswith(".")]
        subfolders[:] = [path.name for path in visible if path != skip and not _is_corpus(path)]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    documents = [path for path in files if path.suffix.lower() in DOCUMENT_SUFFIXES]
    return sorted(documents, key=lambda path: (normalise_id(path.as_posix()), os.fsencode(path)))


def assign_ids(
    found: Iterable[Found | PageGroup], known: Mapping[str, str], replaceable: Collection[str] = ()
) -> list[Source]:
    """Give every file a document id of its own.

    The id is the path below the named folder; a second file of that name gets `name~2.pdf`, and so on.
    `known` maps the ids of a corpus to the files they came from: a file keeps the id it has there, and no
    other file takes that id unless it is among `replaceable` (its file is gone).
    """
    id_of = {(path, _names_file(doc_id, path)): doc_id for doc_id, path in known.items()}
    taken = {doc_id for doc_id in known if doc_id not in replaceable}
    sources = []
    for document in found:
        name, path = document[:2]
        pages = document.pages if isinstance(document, PageGroup) else ()
        # A group is known by the image that was its first, which need not be the first now.
        files = [page.path for page in pages] or [path]
        earlier = (id_of.get((str(file), not pages)) for file in files)
        doc_id = next(filter(None, earlier), None) or _distinct(name, taken)
        taken.add(doc_id)
        sources.append(Source(doc_id, path, pages))
    return sources


def _names_file(doc_id: str, path: str) -> bool:
    """Whether an id is that of a file, not of a group of page images that begins with the file."""
    return PurePosixPath(doc_id).suffix.lower() == PurePosixPath(normalise_id(path)).suffix.lower()


def _distinct(name: str, taken: set[str]) -> str:
    doc_id, number = name, 1
    while doc_id in taken:
        number += 1
        stem, dot, suffix = name.rpartition(".")
        doc_id = f"{stem}~{number}{dot}{suffix}" if dot else f"{name}~{number}"
    return doc_id
