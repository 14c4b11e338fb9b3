"""What an index was made from: hashes of a corpus and of each page's content."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from visor.types import Page, PageStore


def corpus_name(corpus: PageStore) -> str:
    return str(getattr(corpus, "name", "corpus"))


def corpus_hash(pages: Sequence[Page]) -> str:
    """SHA-256 over ids, images and texts of the pages, in order."""
    digest = hashlib.sha256()
    for page in pages:
        _add(digest, page.page_id, page.sha256, page.text, page.caption)
    return digest.hexdigest()


def content_key(page: Page, reads: Literal["text", "image"], corpus: PageStore) -> str:
    """SHA-256 of what an encoder reads of a page, whatever the page is called.

    A page without an image hash is hashed by its pixels.
    """
    digest = hashlib.sha256()
    if reads == "text":
        _add(digest, "text", page.text, page.caption)
    elif page.sha256:
        _add(digest, "image", page.sha256)
    else:
        image = corpus.image(page.page_id)
        _add(digest, "pixels", str(image.size), image.tobytes())
    return digest.hexdigest()


class MadeFor(Protocol):
    """What every index manifest names."""

    retriever: str
    corpus: str
    corpus_hash: str
    page_count: int


def check_corpus(path: Path, manifest: MadeFor, corpus: PageStore | None) -> None:
    """ValueError, naming both, for a corpus or a state of it that an index was not made for; None: any."""
    if corpus is None:
        return
    pages = corpus.pages()
    if manifest.corpus_hash != corpus_hash(pages):
        raise ValueError(
            f"the index {path} was made for corpus {manifest.corpus!r} with {manifest.page_count} pages, "
            f"which is not {corpus_name(corpus)!r} as it is now ({len(pages)} pages); "
            f"{rebuild_hint(path, manifest, corpus)}"
        )


def check_owner(path: Path, manifest: MadeFor | None, corpus: PageStore) -> None:
    """ValueError for a folder that holds the index of another corpus. The same pages under another name are
    the same corpus, and a corpus of that name may have other pages by now."""
    name = corpus_name(corpus)
    if manifest and manifest.corpus != name and manifest.corpus_hash != corpus_hash(corpus.pages()):
        raise ValueError(
            f"{path} holds the index of corpus {manifest.corpus!r} ({manifest.page_count} pages), not of "
            f"{name!r}; give another folder, or --replace to use this one"
        )


def rebuild_hint(path: Path, manifest: MadeFor, corpus: PageStore | None) -> str:
    """What to do about an index that is refused."""
    return f"rebuild it with {index_command(path, corpus, manifest.retriever)}"


def index_command(path: Path | None, corpus: PageStore | None, retriever: str) -> str:
    """The command that makes the index in `path` (None: in the default folder) anew."""
    folder = getattr(corpus, "path", None)
    if folder is None:
        return f"`visor index CORPUS --retriever {retriever}`"
    default = Path(folder) / "index" / retriever
    elsewhere = "" if path is None or path.resolve() == default.resolve() else f" --index {path}"
    return f"`visor index {folder} --retriever {retriever}{elsewhere}`"


def _add(digest, *parts: str | bytes) -> None:
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
