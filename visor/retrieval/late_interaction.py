"""Multi-vector retrieval over a vector store: every token of a query meets every vector of a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast, get_args

from visor.retrieval.base import Query, ScoredPage
from visor.retrieval.coarse import (
    CANDIDATES,
    POOL_FACTOR,
    CoarseRecord,
    PooledSearch,
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
        """`coarse`: the stage to search with, of those the index has; None: that of the index; "exact": none.
        `candidates`: pages scored exactly after a pooled stage; None: as many as were measured."""
        if store.identity.kind != "multi":
            raise ValueError(
                f"the index {store.path} holds one vector a page; late interaction takes several"
            )
        self.store, self.encoder = store, encoder
        record = read_record(store)
        stage = _stage(store, record, coarse)
        self.stage = stage
        if stage is None:
            self._search: MaxSim | PooledSearch = MaxSim(store.shards, store.table, threads)
        else:
            count = candidates or (record and record.candidates) or CANDIDATES
            self._search = open_stage(store, coarse_folder(store), stage, count, threads)

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
        candidates: int = CANDIDATES,
        progress: Progress | None = None,
        replace: bool = False,
    ) -> BuildReport:
        """Encode the corpus into an index folder; see `build_vectors`.

        `encoder`: a name for `load_encoder`, which opening loads again, or an object. `dtype` and
        `max_visual_tokens` are of the encoder. `coarse`: "int8" or "pooled" writes that stage, and its recall
        into the report. Raises ValueError as `build_vectors` does.
        """
        if coarse is not None and coarse not in get_args(Stage):
            raise ValueError(f"coarse is {coarse!r}; known stages: {', '.join(get_args(Stage))}")
        if pool_factor < 2 or candidates < 1:
            raise ValueError(
                f"a pool factor is 2 or more and candidates 1 or more, got {pool_factor} and {candidates}"
            )
        options = {"dtype": dtype, "max_visual_tokens": max_visual_tokens}
        loaded = _load(encoder, device, options)
        settings = {"encoder": encoder if isinstance(encoder, str) else ""}
        settings |= {name: str(value) for name, value in options.items() if value is not None}
        derive = None
        if coarse is not None:
            stage = cast(Stage, coarse)
            settings["coarse"] = stage
            if stage == "pooled":
                settings |= {"pool_factor": str(pool_factor), "candidates": str(candidates)}

            def derive(store: VectorStore, folder: Path) -> None:
                write_coarse(store, folder, stage, pool_factor, candidates)

        report = build_vectors(
            corpus,
            path,
            loaded,
            batch_size=batch_size,
            progress=progress,
            retriever=cls.name,
            settings=settings,
            derive=derive,
            replace=replace,
        )
        record = read_record(open_vectors(path))
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
    if record.stage == "pooled":
        what = f"vectors pooled by {record.pool_factor}, {record.candidates} candidates scored exactly"
    return (
        f"coarse stage {record.stage} ({what}): recall@{record.depth} {record.recall:.3f} against exact "
        f"search, with vectors of {record.queries} pages as queries"
    )


def _stage(store: VectorStore, record: CoarseRecord | None, asked: str | None) -> Stage | None:
    there = record.stage if record is not None else None
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


def _load(encoder: str | Encoder, device: str | None, options: dict) -> Encoder:
    """An encoder by name; a name without a kind is that of a ColQwen2.5 model."""
    if not isinstance(encoder, str):
        return encoder
    given = {name: value for name, value in options.items() if value is not None}
    return load_encoder(encoder if ":" in encoder else f"colqwen:{encoder}", device, **given)
