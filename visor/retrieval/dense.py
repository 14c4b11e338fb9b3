"""One vector a page, compared by inner product in FAISS; exact unless an approximate index is asked for.

Float32 scores of a matrix product depend in their last bits on how many queries and pages share the call,
so they only choose candidates. Scores that are compared and returned are summed in float64, pair by pair, and
are the same however queries are batched. For an exact index an error bound proves that no page of the best k
is missing among the candidates; where it does not, every page is scored.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from visor.retrieval.base import Query, ScoredPage
from visor.retrieval.dense_faiss import (
    FAISS_FILE,
    empty_index,
    fill_index,
    flat_index,
    import_faiss,
    read_index,
)
from visor.retrieval.dense_vectors import DenseVectors
from visor.retrieval.encoders import DEFAULT_ENCODER, load_encoder
from visor.retrieval.encoding import Encoder
from visor.retrieval.generations import VectorStore, check_identity, open_vectors
from visor.retrieval.report import BuildReport, Progress
from visor.retrieval.vector_writer import build_vectors
from visor.types import PageStore

EXACT = "Flat"
"""The factory string of no approximate index."""
MARGIN = 32
"""Candidates that FAISS is asked for beyond k and the excluded pages."""
FULL_SCAN = 1024
"""Above so many candidates every page is scored instead."""
SAMPLE, SAMPLE_DEPTH = 200, 10
"""Pages whose own vectors are the queries that an approximate index's recall@10 is measured with."""


class DenseRetriever:
    """Ranks the pages of a vector store by inner product with the query's vector.

    A page without a vector is no result; a query of white space only finds nothing. A search restricted to
    documents is exact with every index.
    """

    name = "dense"

    def __init__(self, store: VectorStore, encoder: Encoder | None, approximate: Any = None):
        """`approximate`: a FAISS index over the store's vectors in the order of its table; None: exact."""
        self.store = store
        self.encoder = encoder
        self.vectors = DenseVectors(store)
        self._index = approximate
        self.exact = approximate is None
        self._lock = threading.Lock()

    # ------------------------------------------------------------ build and open

    @classmethod
    def build(
        cls,
        corpus: PageStore,
        path: str | Path,
        *,
        encoder: str | Encoder = DEFAULT_ENCODER,
        device: str | None = None,
        batch_size: int = 8,
        faiss_factory: str = EXACT,
        progress: Progress | None = None,
        replace: bool = False,
    ) -> BuildReport:
        """Encode the corpus into an index folder.

        `encoder`: a name for `load_encoder`, which opening loads again, or an object. `faiss_factory`: a
        factory string of FAISS for an approximate index, such as "HNSW32"; search settings may follow
        a semicolon ("IVF256,Flat;nprobe=16"). Raises ValueError as `build_vectors` does.
        """
        import_faiss()
        loaded = load_encoder(encoder, device) if isinstance(encoder, str) else encoder
        settings = {"encoder": encoder if isinstance(encoder, str) else ""}
        notes: list[str] = []
        derive = None
        if faiss_factory != EXACT:
            settings["faiss_factory"] = faiss_factory
            empty_index(faiss_factory, loaded.identity.dimension)

            def derive(store: VectorStore, folder: Path) -> None:
                index = fill_index(DenseVectors(store), faiss_factory)
                import_faiss().write_index(index, str(folder / FAISS_FILE))
                recall, count = measured_recall(store, index)
                notes.append(
                    f"FAISS index {faiss_factory}: recall@{SAMPLE_DEPTH} {recall:.3f} against exact search, "
                    f"with the vectors of {count} pages as queries"
                )

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
        report.notes += notes
        return report

    @classmethod
    def open(
        cls,
        path: str | Path,
        corpus: PageStore | None,
        *,
        encoder: str | Encoder | None = None,
        device: str | None = None,
    ) -> DenseRetriever:
        """Open an index; `encoder` stands in for the one the manifest names (a model that has moved).

        ValueError, saying which is which, for another corpus or an encoder that is not the one it was made
        with, weights included.
        """
        import_faiss()
        store = open_vectors(path, corpus)
        named = encoder or store.manifest.settings.get("encoder")
        if not named:
            raise ValueError(f"the index {path} does not name its encoder; name it with --encoder")
        loaded = load_encoder(named, device) if isinstance(named, str) else named
        check_identity(store.path, store.manifest, loaded.identity, corpus)
        return cls(store, loaded, read_index(store))

    # ------------------------------------------------------------ search

    def search(self, query: str, k: int) -> list[ScoredPage]:
        """The best `k` pages, scores descending, ties by document and page number."""
        return self.search_batch([Query(query, k)])[0]

    def search_batch(self, queries: Sequence[Query]) -> list[list[ScoredPage]]:
        """The pages of each query, encoded and scored together; ids and scores are those of single calls."""
        assert self.encoder is not None
        asked = [i for i, query in enumerate(queries) if query.text.strip() and query.k]
        results: list[list[ScoredPage]] = [[] for _ in queries]
        if asked and len(self.vectors):
            encoded = self.encoder.encode_queries([queries[i].text for i in asked])
            vectors_QD = np.concatenate([vector.vectors_TD for vector in encoded]).astype(np.float32)
            for i, hits in zip(asked, self.nearest(vectors_QD, [queries[i] for i in asked]), strict=True):
                results[i] = hits
        return results

    def nearest(self, vectors_QD: np.ndarray, queries: Sequence[Query]) -> list[list[ScoredPage]]:
        """The best pages by given query vectors, float32; the texts of `queries` are not read."""
        if not np.isfinite(vectors_QD).all():
            raise ValueError(f"encoder {self.store.identity.name!r} gave a query a vector that is not finite")
        excluded = [self.store.table.excluded(query) for query in queries]
        wanted = [
            query.k + (0 if rows is None else len(rows)) + MARGIN
            for query, rows in zip(queries, excluded, strict=True)
        ]
        by_faiss = [i for i, count in enumerate(wanted) if count <= FULL_SCAN and queries[i].doc_ids is None]
        results: dict[int, list[ScoredPage] | None] = {}
        if by_faiss:
            count = max(wanted[i] for i in by_faiss)
            scores_QC, ids_QC = self._search_faiss(vectors_QD[by_faiss], count)
            for place, i in enumerate(by_faiss):
                results[i] = self._decide(
                    vectors_QD[i], queries[i], excluded[i], scores_QC[place], ids_QC[place]
                )
        return [
            hits if (hits := results.get(i)) is not None else self._scan(vectors_QD[i], queries[i])
            for i in range(len(queries))
        ]

    def _decide(
        self,
        query_D: np.ndarray,
        query: Query,
        excluded: np.ndarray | None,
        scores_C: np.ndarray,
        ids_C: np.ndarray,
    ) -> list[ScoredPage] | None:
        """Rank FAISS's candidates; None when a page outside them may belong to the best k."""
        found = ids_C >= 0
        rows = self.vectors.rows[ids_C[found]]
        if excluded is not None:
            rows = rows[~np.isin(rows, excluded)]
        hits = self._ranked(query_D, rows, query.k)
        complete = not found.all() or found.sum() >= len(self.vectors)
        if not self.exact or complete:
            return hits
        # A page outside has a float32 score of at most the last candidate's.
        bound = float(scores_C[found][-1]) + self.vectors.error_bound(query_D)
        return hits if len(hits) == query.k and hits[-1].score > bound else None

    def _scan(self, query_D: np.ndarray, query: Query) -> list[ScoredPage]:
        """Score every allowed page."""
        rows = self.vectors.rows
        allowed = self.store.table.allowed(query)
        if allowed is not None:
            rows = rows[allowed[rows]]
        if len(rows) > max(query.k, FULL_SCAN):
            scores = self.vectors.float32_scores(query_D)[rows]
            place = len(rows) - max(query.k, 1)
            least = np.partition(scores, place)[place]
            rows = rows[scores >= least - 2 * self.vectors.error_bound(query_D)]
        return self._ranked(query_D, rows, query.k)

    def _ranked(self, query_D: np.ndarray, rows: np.ndarray, k: int) -> list[ScoredPage]:
        rows = np.sort(rows)  # ties keep the order of the table
        scores = self.vectors.scores(query_D, rows)
        best = np.argsort(-scores, kind="stable")[:k]
        page_ids = self.store.table.page_ids
        return [ScoredPage(page_ids[rows[i]], float(scores[i])) for i in best]

    def _search_faiss(self, vectors_QD: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        with self._lock:
            if self._index is None:
                self._index = flat_index(self.vectors)
        return self._index.search(np.ascontiguousarray(vectors_QD), min(count, len(self.vectors)))


def measured_recall(store: VectorStore, approximate: Any) -> tuple[float, int]:
    """Recall@10 of an approximate index against exact search, and the number of queries: pages' own vectors,
    spread over the store, each searched among the other pages."""
    exact, found = DenseRetriever(store, None), DenseRetriever(store, None, approximate)
    vectors = exact.vectors
    sample = vectors.rows[np.linspace(0, len(vectors) - 1, min(SAMPLE, len(vectors))).astype(int)]
    queries = [Query("", SAMPLE_DEPTH, frozenset([store.table.page_ids[row]])) for row in sample]
    right = total = 0
    for wanted, got in zip(
        exact.nearest(vectors.at(sample), queries), found.nearest(vectors.at(sample), queries), strict=True
    ):
        right += len({hit.page_id for hit in wanted} & {hit.page_id for hit in got})
        total += len(wanted)
    return (right / total if total else 1.0), len(sample)
