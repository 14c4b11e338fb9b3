"""Multi-vector retrieval over a vector store: every token of a query meets every vector of a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast, get_args

from visor.retrieval.base import Query, ScoredPage
from visor.retrieval.coarse import (
    POOL_FACTOR,
    CoarseRecord,
    Search,
    Stage,
    coarse_folder,
    open_stage,
    read_record,
    write_coarse,
)
from visor.retrieval.encoders import load_encoder
from visor.retrieval.encoding import Encoder, QueryVectors
from visor.retrieval.generations import VectorStore, check_identity, open_vectors
from visor.retrieval.maxsim import MaxSim
from visor.retrieval.report import BuildReport, Progress
from visor.retrieval.vector_writer import build_vectors
from visor.types import PageStore

DEFAULT_MODEL = "colqwen:vidore/colqwen2.5-v0.2"
EXACT = "exact"
DEFAULT_CANDIDATES = {"pooled": 50, "qdrant": 100}


class LateInteractionRetriever:
    """Ranks the pages of a store by MaxSim with the query's vectors.

    A page without vectors is no result; a query of white space only finds nothing. Queries are encoded one by
    one, so that no query's vectors depend on which others share the batch; they are scored together.
    """

    name = "colqwen"

    def __init__(
        self,
        store: VectorStore,
        encoder: Encoder | None,
        *,
        coarse: str | None = None,
        candidates: int | None = None,
        threads: int | None = None,
    ):
        """`coarse`: the stage to search with; None: that of the index; "exact": none. `candidates`: pages
        scored exactly after a stage with pooled vectors; None: as many as were measured."""
        if store.identity.kind != "multi":
            raise ValueError(
                f"the index {store.path} holds one vector a page; late interaction takes several"
            )
        self.store, self.encoder = store, encoder
        self.stage = _stage(store, coarse)
        self._search = _search_of(store, self.stage, candidates, threads)

    # ------------------------------------------------------------ build and open

    @classmethod
    def build(
        cls,
        corpus: PageStore,
        path: str | Path,
        *,
        encoder: str | Encoder = DEFAULT_MODEL,
        device: str | None = None,
        dtype: str | None = None,
        max_visual_tokens: int | None = None,
        batch_size: int = 4,
        coarse: str | None = None,
        pool_factor: int = POOL_FACTOR,
        candidates: int | None = None,
        progress: Progress | None = None,
        replace: bool = False,
    ) -> BuildReport:
        """Encode the corpus into an index folder; see `build_vectors`.

        `encoder`: a name for `load_encoder`, which opening loads again, or an object. `dtype` and
        `max_visual_tokens` are of the encoder. `coarse`: "int8", "pooled" or "qdrant" writes that stage, and
        its recall into the report. Raises ValueError as `build_vectors` does.
        """
        stage = _known_stage(coarse, pool_factor, candidates)
        options = {"dtype": dtype, "max_visual_tokens": max_visual_tokens}
        loaded = _load(encoder, device, options)
        settings = {"encoder": encoder if isinstance(encoder, str) else ""}
        settings |= {name: str(value) for name, value in options.items() if value is not None}
        if stage is not None:
            settings["coarse"] = stage
        if stage in ("pooled", "qdrant"):
            candidates = candidates or DEFAULT_CANDIDATES[stage]
            settings |= {"pool_factor": str(pool_factor), "candidates": str(candidates)}

        def derive(store: VectorStore, folder: Path) -> None:
            if stage in ("int8", "pooled"):
                write_coarse(store, folder, stage, pool_factor, candidates or 0)

        report = build_vectors(
            corpus,
            path,
            loaded,
            batch_size=batch_size,
            progress=progress,
            retriever=cls.name,
            settings=settings,
            derive=derive if stage in ("int8", "pooled") else None,
            replace=replace,
        )
        if stage is not None:
            store = open_vectors(path)
            record = (
                _qdrant_record(store, pool_factor, candidates) if stage == "qdrant" else read_record(store)
            )
            if record is not None:
                report.notes.append(describe(record))
        return report

    @classmethod
    def open(
        cls,
        path: str | Path,
        corpus: PageStore | None,
        *,
        encoder: str | Encoder | None = None,
        device: str | None = None,
        coarse: str | None = None,
        candidates: int | None = None,
        threads: int | None = None,
    ) -> LateInteractionRetriever:
        """Open an index; `encoder` stands in for the one the manifest names (a model that has moved).

        ValueError, saying which is which, for another corpus, an encoder that is not the one it was made
        with, weights included, and a coarse stage that the index does not have.
        """
        store = open_vectors(path, corpus)
        settings = store.manifest.settings
        named = encoder or settings.get("encoder")
        if not named:
            raise ValueError(f"the index {path} does not name its encoder; name it with --encoder")
        tokens = settings.get("max_visual_tokens")
        options = {
            "dtype": settings.get("dtype"),
            "max_visual_tokens": int(tokens) if tokens is not None else None,
        }
        loaded = _load(named, device, options)
        check_identity(store.path, store.manifest, loaded.identity, corpus)
        return cls(store, loaded, coarse=coarse, candidates=candidates, threads=threads)

    # ------------------------------------------------------------ search

    def search(self, query: str, k: int) -> list[ScoredPage]:
        """The best `k` pages, scores descending, ties by document and page number."""
        return self.search_batch([Query(query, k)])[0]

    def search_batch(self, queries: Sequence[Query]) -> list[list[ScoredPage]]:
        """The pages of each query; see `search`."""
        assert self.encoder is not None, "opened for vectors only"
        results: list[list[ScoredPage]] = [[] for _ in queries]
        asked = [i for i, query in enumerate(queries) if query.text.strip() and query.k > 0]
        vectors = [self.encoder.encode_queries([queries[i].text])[0] for i in asked]
        for i, hits in zip(asked, self.nearest(vectors, [queries[i] for i in asked]), strict=True):
            results[i] = hits
        return results

    def nearest(self, vectors: Sequence[QueryVectors], queries: Sequence[Query]) -> list[list[ScoredPage]]:
        """The pages of each query by its vectors; of `queries`, the texts are not read."""
        return self._search.search(vectors, queries)


def describe(record: CoarseRecord) -> str:
    """A stage and its recall in a line."""
    what = "8-bit codes, exact by their error bound"
    if record.stage != "int8":
        what = f"vectors pooled by {record.pool_factor}, {record.candidates} candidates scored exactly"
    return (
        f"coarse stage {record.stage} ({what}): recall@{record.depth} {record.recall:.3f} against exact "
        f"search, with vectors of {record.queries} pages as queries"
    )


def _known_stage(name: str | None, pool_factor: int, candidates: int | None) -> Stage | None:
    """ValueError for a stage that there is not, and for settings out of range."""
    if pool_factor < 2 or (candidates is not None and candidates < 1):
        raise ValueError(
            f"a pool factor is 2 or more and candidates 1 or more, got {pool_factor} and {candidates}"
        )
    if name is not None and name not in get_args(Stage):
        raise ValueError(f"coarse is {name!r}; known stages: {', '.join(get_args(Stage))}")
    if name == "qdrant":
        from visor.retrieval.qdrant import import_engine

        import_engine()  # before pages are encoded for hours
    return cast("Stage | None", name)


def _qdrant_record(store: VectorStore, pool_factor: int, candidates: int | None) -> CoarseRecord:
    """Of the collection that is there if it fits, else of a new one."""
    from visor.retrieval import qdrant

    try:
        record = qdrant.check_collection(store).coarse
        if (record.pool_factor, record.candidates) == (pool_factor, candidates):
            return record
    except ValueError:
        pass
    return qdrant.write_collection(store, pool_factor, candidates or DEFAULT_CANDIDATES["qdrant"])


def _stage(store: VectorStore, asked: str | None) -> Stage | None:
    """The stage to search with: the one asked for, or the index's own."""
    there = cast("Stage | None", store.manifest.settings.get("coarse"))
    if asked is None:
        return there
    if asked == EXACT:
        return None
    if asked != there:
        has = f"has the stage {there!r}" if there else "has none"
        raise ValueError(
            f"the index {store.path} has no coarse stage {asked!r}: it {has}; build it with --coarse {asked}"
        )
    return there


def _search_of(
    store: VectorStore, stage: Stage | None, candidates: int | None, threads: int | None
) -> Search:
    if stage is None:
        return MaxSim(store.shards, store.table, threads)
    if stage == "qdrant":
        from visor.retrieval.qdrant import open_collection

        return open_collection(store, candidates, threads)
    record = read_record(store)
    if record is None or record.stage != stage:
        raise ValueError(f"the index {store.path} lacks the files of its stage {stage!r}; rebuild it")
    return open_stage(store, coarse_folder(store), stage, candidates or record.candidates or 0, threads)


def _load(encoder: str | Encoder, device: str | None, options: dict) -> Encoder:
    """An encoder by name; a name without a kind is that of a ColQwen2.5 model."""
    if not isinstance(encoder, str):
        return encoder
    given = {name: value for name, value in options.items() if value is not None}
    return load_encoder(encoder if ":" in encoder else f"colqwen:{encoder}", device, **given)
