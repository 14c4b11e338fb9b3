"""What an index was made from: hashes of a corpus and of each page's content."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

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


def _add(digest, *parts: str | bytes) -> None:
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
