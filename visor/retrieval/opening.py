"""An index named by where it is: a folder, or the address of a service."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from visor.types import PageStore

if TYPE_CHECKING:
    from visor.retrieval.client import RetrievalClient

REMOTE = ("http://", "https://", "peer+http://", "peer+https://")


def is_remote(index: str | Path | None) -> bool:
    """True for the address of a retrieval service, ours or (peer+…) a peer's."""
    return isinstance(index, str) and index.startswith(REMOTE)


def index_location(index: str | None, default: Path) -> str | Path:
    """The address as it is, a folder as a path, `default` when none is named."""
    if index and is_remote(index):
        return index
    return Path(index) if index else default


def resolved(location: str | Path) -> str:
    """The location written so that it holds from any working folder."""
    return str(location) if is_remote(location) else str(Path(location).resolve())


def describe_index(path: str | Path, retriever: str) -> dict[str, Any]:
    """The manifest of an index folder as a mapping; of a hybrid, those of its two indexes as `parts`.

    Raises ValueError when there is none.
    """
    from visor.retrieval.index import read_manifest

    if not retriever.startswith("hybrid"):
        return read_manifest(path).model_dump(mode="json")
    names = (retriever.partition(":")[2] or "bm25+dense").split("+")
    parts = [read_manifest(Path(path) / name).model_dump(mode="json") for name in names]
    shared = {name: parts[0][name] for name in ("corpus", "corpus_hash", "page_count")}
    return {"retriever": retriever, "parts": parts, **shared}


def open_remote(url: str, corpus: PageStore, retriever: str | None = None, **options: Any) -> RetrievalClient:
    """Connect to the service at `url` for a corpus; `options` as `RetrievalClient` has them.

    Raises ValueError when nothing answers there, when it serves another corpus, or (`retriever` given) when
    it ranks with another retriever.
    """
    from visor.retrieval.client import RetrievalClient, RetrievalError

    try:
        client = RetrievalClient(url, pages=corpus.pages(), **options)
    except RetrievalError as error:
        raise ValueError(str(error)) from None
    if retriever is not None and retriever != client.name:
        client.close()
        raise ValueError(f"the service at {url} ranks with {client.name!r}, not {retriever!r}")
    return client
