"""Pooled vectors in Qdrant, whose best pages are scored exactly from our own store.

The engine is Qdrant's own, in this process (`qdrant-edge-py`); the collection lies in the index folder, in
`qdrant/`. A point is a page: its id is the page's row in the store's table, its vectors are compared by
Qdrant's MaxSim, and its payload names page and document. A row means nothing in another generation, so a
collection says which it was made from, and is refused for any other.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import ValidationError

from visor.files import sync_tree, write_atomically
from visor.retrieval.base import Query, ScoredPage
from visor.retrieval.coarse import (
    POOL_FACTOR,
    SAMPLE_DEPTH,
    CoarseRecord,
    measured_recall,
    pooled_pages,
    rescored,
)
from visor.retrieval.disk import build_lock
from visor.retrieval.encoders import missing_extra
from visor.retrieval.encoding import QueryVectors
from visor.retrieval.generations import VectorStore
from visor.retrieval.maxsim import MaxSim
from visor.types import SCHEMA_VERSION, Record, split_page_id

FOLDER, SHARD, RECORD_FILE = "qdrant", "shard", "collection.json"
CANDIDATES = 100
BATCH = 64
"""Pages sent to the engine at once."""


class CollectionRecord(Record):
    """`collection.json`, written when the collection is complete."""

    schema_version: int = SCHEMA_VERSION
    generation: int
    created: str
    """When the generation was made: two indexes can have the same number."""
    points: int
    pool_factor: int
    coarse: CoarseRecord


class QdrantSearch:
    """Searches a collection for candidates and scores them exactly."""

    def __init__(self, store: VectorStore, engine: Any, candidates: int, threads: int | None = None):
        self._exact = MaxSim(store.shards, store.table, threads)
        self._engine, self.candidates = engine, candidates

    def search(self, vectors: Sequence[QueryVectors], queries: Sequence[Query]) -> list[list[ScoredPage]]:
        """The best pages of each query among its candidates (`candidates`, or k of the query if more)."""
        edge = import_engine()
        rows = [np.empty(0, np.int64) for _ in queries]
        asked = [i for i, query in enumerate(queries) if query.k > 0 and len(vectors[i].vectors_TD)]
        requests = [
            edge.QueryRequest(
                limit=max(self.candidates, queries[i].k),
                query=edge.Query.Nearest(np.asarray(vectors[i].vectors_TD, np.float32).tolist()),
                filter=self._filter(edge, queries[i]),
                with_payload=False,
            )
            for i in asked
        ]
        found = self._engine.query_batch(edge.QueryBatchRequest(requests)) if requests else []
        for i, points in zip(asked, found, strict=True):
            rows[i] = np.array([point.id for point in points], np.int64)
        return rescored(self._exact, vectors, queries, rows)

    def _filter(self, edge: Any, query: Query) -> Any:
        seen = {self._exact.table.row(page_id) for page_id in query.exclude_page_ids} - {None}
        documents = None if query.doc_ids is None else sorted(query.doc_ids)
        if not seen and documents is None:
            return None
        return edge.Filter(
            must_not=[edge.HasIdCondition(seen)] if seen else None,
            must=None
            if documents is None
            else [edge.FieldCondition("doc_id", match=edge.MatchAny(documents))],
        )


def write_collection(
    store: VectorStore, pool_factor: int = POOL_FACTOR, candidates: int = CANDIDATES
) -> CoarseRecord:
    """Put the pooled vectors of a store into a new collection in place of the one that is there; returns its
    recall, measured. ValueError when the extra is not installed or a build is under way."""
    with build_lock(store.path):
        return _write(import_engine(), store, pool_factor, candidates)


def _write(edge: Any, store: VectorStore, pool_factor: int, candidates: int) -> CoarseRecord:
    folder, fresh = store.path / FOLDER, store.path / f".{FOLDER}.tmp"
    shutil.rmtree(fresh, ignore_errors=True)  # of a build that was killed
    (fresh / SHARD).mkdir(parents=True)
    vectors = edge.EdgeVectorParams(
        size=store.identity.dimension,
        distance=edge.Distance.Dot,
        multivector_config=edge.MultiVectorConfig(edge.MultiVectorComparator.MaxSim),
        datatype=edge.VectorStorageDatatype.Float16,
    )
    engine = edge.EdgeShard.create(str(fresh / SHARD), edge.EdgeConfig(vectors=vectors, wal_enabled=False))
    points, waiting = 0, []
    rows = np.concatenate([shard.rows for shard in store.shards])
    for row, pooled in zip(rows.tolist(), pooled_pages(store, pool_factor), strict=True):
        if not len(pooled):
            continue
        page_id = store.table.page_ids[row]
        payload = {"page_id": page_id, "doc_id": split_page_id(page_id)[0]}
        waiting.append(edge.Point(row, pooled.astype(np.float32).tolist(), payload))
        if len(waiting) == BATCH:
            engine.update(edge.UpdateOperation.upsert_points(waiting))
            points, waiting = points + len(waiting), []
    if waiting:
        engine.update(edge.UpdateOperation.upsert_points(waiting))
    points += len(waiting)
    engine.optimize()
    engine.flush()
    search = QdrantSearch(store, engine, candidates)
    recall, count = measured_recall(MaxSim(store.shards, store.table), search, store)
    engine.close()
    coarse = CoarseRecord(
        stage="qdrant",
        pool_factor=pool_factor,
        candidates=candidates,
        recall=recall,
        depth=SAMPLE_DEPTH,
        queries=count,
    )
    record = CollectionRecord(
        generation=store.generation,
        created=store.manifest.created,
        points=points,
        pool_factor=pool_factor,
        coarse=coarse,
    )
    write_atomically(fresh / RECORD_FILE, record.model_dump_json(indent=1) + "\n")
    sync_tree(fresh)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(fresh, folder)
    return coarse


def open_collection(
    store: VectorStore, candidates: int | None = None, threads: int | None = None
) -> QdrantSearch:
    """The search of a store with its collection.

    ValueError, saying how to write it anew, when there is none, when it was made from another generation of
    the index, or when it is damaged.
    """
    edge = import_engine()
    record = check_collection(store)
    folder = store.path / FOLDER
    try:
        engine = edge.EdgeShard.load(str(folder / SHARD))
        points = engine.count(edge.CountRequest())
    except Exception as error:  # the engine has an exception of its own for everything
        raise ValueError(f"the Qdrant collection {folder} cannot be opened: {error}; {_again()}") from error
    if points != record.points:
        raise ValueError(
            f"the Qdrant collection {folder} has {points} points, not {record.points}; {_again()}"
        )
    return QdrantSearch(store, engine, candidates or record.coarse.candidates or CANDIDATES, threads)


def check_collection(store: VectorStore) -> CollectionRecord:
    """The record of a store's collection; ValueError as `open_collection`."""
    folder = store.path / FOLDER
    file = folder / RECORD_FILE
    if not file.is_file():
        raise ValueError(f"{store.path} has no Qdrant collection; {_again()}")
    try:
        record = CollectionRecord.model_validate_json(file.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise ValueError(f"{file} is damaged ({error.errors()[0]['msg']}); {_again()}") from None
    if (record.generation, record.created) != (store.generation, store.manifest.created):
        raise ValueError(
            f"the Qdrant collection {folder} was made from generation {record.generation} of the index "
            f"({record.created}), which is at generation {store.generation} ({store.manifest.created}); "
            f"{_again()}"
        )
    return record


def _again() -> str:
    return "write it with `visor index CORPUS --retriever colqwen --coarse qdrant`"


def import_engine() -> Any:
    """The engine's module; ValueError when the extra is not installed."""
    try:
        import qdrant_edge
    except ImportError:
        raise missing_extra("qdrant-edge-py", "qdrant") from None
    return qdrant_edge
