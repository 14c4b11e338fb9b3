"""An index named by where it is: a folder, or the address of a service."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from visor.retrieval.hybrid import hybrid_parts
from visor.types import PageStore

if TYPE_CHECKING:
    from visor.retrieval.client import RetrievalClient

REMOTE = ("http://", "https://", "peer+http://", "peer+https://")
FOR_ENCODING = ("encoder", "device")


def is_remote(index: str | Path | None) -> bool:
    """True for the address of a retrieval service, ours or (peer+…) a peer's."""
    return isinstance(index, str) and index.startswith(REMOTE)


def resolved(location: str | Path) -> str:
    """The location written so that it holds from any working folder."""
    return str(location) if is_remote(location) else str(Path(location).resolve())


def describe_index(path: str | Path, retriever: str, corpus: PageStore | None = None) -> dict[str, Any]:
    """The manifest of an index folder as a mapping; of a hybrid, those of its two indexes as `parts`.

    Raises ValueError when there is none; what to do then names the `corpus`.
    """
    names = hybrid_parts(retriever)
    if names is None:
        return _manifest(path, retriever, corpus)
    parts = [_manifest(Path(path) / name, name, corpus) for name in names]
    shared = {name: parts[0][name] for name in ("corpus", "corpus_hash", "page_count")}
    return {"retriever": retriever, "parts": parts, **shared}


def _manifest(path: str | Path, retriever: str, corpus: PageStore | None) -> dict[str, Any]:
    from visor.retrieval.index import has_index, no_index, read_manifest

    if not has_index(path):
        raise ValueError(no_index(path, getattr(corpus, "path", "CORPUS"), retriever))
    return read_manifest(path, corpus).model_dump(mode="json")


def open_remote(url: str, corpus: PageStore, retriever: str | None = None, **options: Any) -> RetrievalClient:
    """Connect to the service at `url` for a corpus; `options` as `RetrievalClient` has them.

    Raises ValueError when nothing answers there, when it serves another corpus, or (`retriever` given) when
    it ranks with another retriever.
    """
    from visor.retrieval.client import RetrievalClient, RetrievalError

    refused = [name for name in FOR_ENCODING if name in options]
    if refused:
        raise ValueError(
            f"{' and '.join(refused)} cannot be chosen for {url}: the service encodes the queries"
        )
    try:
        client = RetrievalClient(url, pages=corpus.pages(), **options)
    except RetrievalError as error:
        raise ValueError(str(error)) from None
    parts = hybrid_parts(retriever) if retriever else None
    wanted = f"hybrid:{parts[0]}+{parts[1]}" if parts else retriever
    if wanted is not None and wanted != client.name:
        client.close()
        raise ValueError(f"the service at {url} ranks with {client.name!r}, not {wanted!r}")
    return client
