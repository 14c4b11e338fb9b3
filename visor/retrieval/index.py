"""Build an index of a corpus, and open it again only for the corpus and encoder it was made with.

What every retriever class offers, and how one is found by its name. An index says which retriever made it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from visor.retrieval.base import BatchRetriever
from visor.retrieval.bm25_index import BM25Manifest, has_bm25, read_bm25_manifest
from visor.retrieval.content import corpus_hash, corpus_name, index_command
from visor.retrieval.disk import in_the_way
from visor.retrieval.generations import SHARDS, VectorManifest, has_vectors, read_vector_manifest
from visor.retrieval.hybrid import HybridRetriever, hybrid_parts
from visor.retrieval.opening import is_remote, open_remote
from visor.retrieval.report import BuildReport
from visor.types import PageStore

__all__ = ["build_index", "corpus_hash", "default_index_path", "index_path", "open_index", "read_manifest"]

DEFAULT_RETRIEVER = "bm25"


class IndexedRetriever(Protocol):
    """What an entry of RETRIEVERS offers. Options are keyword arguments; those of `build` include `progress`
    and `replace`."""

    @classmethod
    def build(cls, corpus: PageStore, path: str | Path, **options: Any) -> BuildReport: ...

    @classmethod
    def open(cls, path: str | Path, corpus: PageStore, **options: Any) -> BatchRetriever: ...


def _bm25() -> Any:
    from visor.retrieval.bm25_index import BM25Index

    return BM25Index


def _dense() -> Any:
    from visor.retrieval.dense import DenseRetriever

    return DenseRetriever


def _colqwen() -> Any:
    from visor.retrieval.late_interaction import LateInteractionRetriever  # type: ignore

    return LateInteractionRetriever


RETRIEVERS: dict[str, Callable[[], Any]] = {"bm25": _bm25, "dense": _dense, "colqwen": _colqwen}
"""Name → function that imports and returns an IndexedRetriever, so that its libraries load late."""


def default_index_path(corpus_path: str | Path, retriever: str = DEFAULT_RETRIEVER) -> Path:
    """`CORPUS/index/RETRIEVER`; for a hybrid, `CORPUS/index`, below which its parts are.

    Raises ValueError for a retriever that there is not.
    """
    check_retriever(retriever)
    folder = Path(corpus_path) / "index"
    return folder if hybrid_parts(retriever) else folder / retriever


def index_path(
    corpus_path: str | Path, index: str | Path | None = None, retriever: str | None = None
) -> str | Path:
    """Where a corpus's index is: the folder or (as text) the service that was named, or the default folder of
    the retriever."""
    if is_remote(index):
        return str(index)
    return Path(index) if index else default_index_path(corpus_path, retriever or DEFAULT_RETRIEVER)


def build_index(
    corpus: PageStore, path: str | Path, retriever: str = DEFAULT_RETRIEVER, **options: Any
) -> BuildReport:
    """Index a corpus into the folder `path`; until it is done, an index that is there stays in service.

    Options that are not given are those the index in the folder was made with, unless its encoder is to be
    another one.

    Raises ValueError for an unknown retriever or option, a corpus without pages, and a folder that holds the
    index of another retriever, corpus or encoder.
    """
    if parts := hybrid_parts(retriever):
        raise ValueError(f"{retriever} has no index of its own; build its parts: {' and '.join(parts)}")
    indexed = _retriever_class(retriever)
    if has_index(path):
        try:
            manifest = read_manifest(path)
        except ValueError:
            manifest = None  # damaged: the build replaces it
        if manifest and manifest.retriever != retriever:
            raise ValueError(
                f"{path} holds an index made by {manifest.retriever!r}, which {retriever!r} does not "
                "replace; give another folder, or remove it"
            )
        if isinstance(manifest, VectorManifest):
            options = _known(indexed.build, _made_with(manifest, options)) | options
    return indexed.build(corpus, path, **_checked(retriever, indexed.build, options))


def _made_with(manifest: VectorManifest, options: dict[str, Any]) -> dict[str, Any]:
    """The options an index was made with, for an update of it; none when another encoder is asked for."""
    if options.get("encoder") not in (None, manifest.settings.get("encoder")):
        return {}
    return {k: int(v) if v.isdigit() else v for k, v in manifest.settings.items() if v}


def open_index(
    path: str | Path, corpus: PageStore, retriever: str | None = None, **options: Any
) -> BatchRetriever:
    """Open the index in `path`, a folder or the address of a service, for a corpus.

    `retriever`: the one expected; None: whichever made the index. A hybrid, `hybrid:bm25+dense`, opens its
    parts in the folders `path/bm25` and `path/dense`. Options go to the retriever (for each part of a hybrid,
    those it knows).

    Raises ValueError for an unknown retriever and a corpus without pages; and, saying which is which and to
    rebuild, when there is no index, when it is damaged, or
    when it was made for another corpus or state of it, by another retriever, or with another encoder.
    """
    check_pages(corpus)
    if is_remote(path):
        return open_remote(str(path), corpus, retriever, **options)
    if retriever is not None:
        check_retriever(retriever)
    if retriever is not None and (parts := hybrid_parts(retriever)):
        depth = {name: options.pop(name) for name in ("depth",) if name in options}
        opened = [
            open_index(Path(path) / part, corpus, part, **_known(_retriever_class(part).open, options))
            for part in parts
        ]
        return HybridRetriever(opened[0], opened[1], **depth)
    if not has_index(path):
        raise ValueError(no_index(path, getattr(corpus, "path", "CORPUS"), retriever))
    manifest = read_manifest(path, corpus)
    if retriever is not None and retriever != manifest.retriever:
        raise ValueError(
            f"the index {path} was made by {manifest.retriever!r}, not {retriever!r}; "
            f"make one with {index_command(None, corpus, retriever)} and search without --index"
        )
    indexed = _retriever_class(manifest.retriever)
    return indexed.open(path, corpus, **_checked(manifest.retriever, indexed.open, options))


def check_pages(corpus: PageStore) -> None:
    """ValueError for a corpus that nothing can be found in; indexing it would not help."""
    if not corpus.pages():
        name = getattr(corpus, "path", corpus_name(corpus))
        raise ValueError(
            f"{name} has no pages, so there is nothing to search; add documents with `visor ingest`"
        )


def no_index(path: str | Path, corpus: str | Path, retriever: str | None) -> str:
    """What to do where a folder holds no index; `corpus`: its folder."""
    if blocked := in_the_way(Path(path)):
        return blocked
    command = f"visor index {corpus}"
    if retriever not in (None, DEFAULT_RETRIEVER):
        command += f" --retriever {retriever}"
    if (Path(path) / SHARDS).is_dir():
        return f"{path} holds no index yet, only a build that did not finish; go on with `{command}`"
    return f"{path} holds no index; make one with `{command}`"


def has_index(path: str | Path) -> bool:
    """Whether a folder holds an index of any retriever."""
    return has_vectors(path) or has_bm25(path)


def read_manifest(path: str | Path, corpus: PageStore | None = None) -> BM25Manifest | VectorManifest:
    """Read an index's manifest. Raises ValueError when there is none or it is of another version; what to do
    then names the `corpus`."""
    return read_vector_manifest(path, corpus) if has_vectors(path) else read_bm25_manifest(path, corpus)


def check_retriever(name: str) -> None:
    """ValueError, naming those there are, for an unknown retriever, also as a part of a hybrid."""
    for part in hybrid_parts(name) or (name,):
        if part not in RETRIEVERS:
            known = ", ".join([*sorted(RETRIEVERS), "hybrid:FIRST+SECOND"])
            raise ValueError(f"unknown retriever {part!r}; known: {known}")


def _retriever_class(name: str) -> Any:
    check_retriever(name)
    return RETRIEVERS[name]()


def _checked(retriever: str, function: Callable, options: dict[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(options) - set(_known(function, options)))
    if unknown:
        raise ValueError(f"{retriever} has no option {', '.join(unknown)}")
    return options


def _known(function: Callable, options: dict[str, Any]) -> dict[str, Any]:
    """The options that a function takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return options
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in options.items() if name in names}
