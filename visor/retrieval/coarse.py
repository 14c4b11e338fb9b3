"""Optional files beside an index that make late interaction cheaper; derived from the vectors, part of the
generation.

- `int8`: the codes that the exact search's scan computes, stored (half the size of the vectors again). The
  search stays exact: its bounds hold for the stored codes as for computed ones.
- `pooled`: fewer vectors stand for a page's (`pooling`). The best pages by them are candidates, which are
  scored exactly. Pages can be missed; how many is measured when the index is built.
- `qdrant`: the pooled vectors are in a Qdrant collection (`visor.retrieval.qdrant`).

A stage's recall@5 against exact search is kept in `coarse.json`. Axes in names: S page tokens, D dimension,
P pages of all shards ("slots").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from pydantic import ValidationError

from visor.retrieval.base import Query, ScoredPage
from visor.retrieval.encoding import QueryVectors
from visor.retrieval.generations import GENERATIONS, VectorStore
from visor.retrieval.maxsim import MaxSim
from visor.retrieval.maxsim_kernels import as_tensor, code_scale, worker_pool
from visor.retrieval.maxsim_scan import StoredCodes
from visor.retrieval.pooling import pool_tokens
from visor.types import SCHEMA_VERSION, Record

Stage = Literal["int8", "pooled", "qdrant"]
COARSE_FILE = "coarse.json"
CODES_FILE, SCALES_FILE = "codes.bin", "scales.bin"
POOLED_FILE, POOLED_OFFSETS_FILE = "pooled.bin", "pooled_offsets.bin"
POOL_FACTOR = 9
CANDIDATES = 50
AHEAD = 4
"""Pages pooled ahead of the one that is written, for each thread."""
SAMPLE, SAMPLE_TOKENS, SAMPLE_DEPTH = 100, 20, 5
"""Pages that give the queries of a recall measurement, vectors of each in its query, and pages compared."""


class CoarseRecord(Record):
    """`coarse.json`: what a stage is and how well it does."""

    schema_version: int = SCHEMA_VERSION
    stage: Stage
    pool_factor: int | None = None
    candidates: int | None = None
    """Pages scored exactly for each query, of a stage with pooled vectors."""
    recall: float
    """Mean share of the exact best `depth` pages that are found."""
    depth: int
    queries: int
    """Queries of the measurement: vectors of as many pages, each page left out of its own results."""


class Search(Protocol):
    """What a retriever searches with."""

    def search(self, vectors: Sequence[QueryVectors], queries: Sequence[Query]) -> list[list[ScoredPage]]: ...


@dataclass(frozen=True)
class PooledShard:
    """Pooled vectors of all pages of a store, in the form of a shard."""

    vectors: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray


class PooledSearch:
    """Searches by pooled vectors and scores the best candidates exactly."""

    def __init__(self, exact: MaxSim, pooled: MaxSim, candidates: int = CANDIDATES):
        """`pooled`: over the same table as `exact`."""
        self.exact, self._pooled, self.candidates = exact, pooled, candidates

    def search(self, vectors: Sequence[QueryVectors], queries: Sequence[Query]) -> list[list[ScoredPage]]:
        """The best pages of each query among its candidates; see `MaxSim.search`. As many candidates as a
        query asks pages for are scored, if those are more."""
        found = self._pooled.candidates(vectors, queries, self.candidates)
        return rescored(self.exact, vectors, queries, found)


def rescored(
    exact: MaxSim,
    vectors: Sequence[QueryVectors],
    queries: Sequence[Query],
    candidates: Sequence[np.ndarray],
) -> list[list[ScoredPage]]:
    """The best of each query's candidate rows by their exact scores."""
    results = []
    for query_vectors, query, rows in zip(vectors, queries, candidates, strict=True):
        scores = np.full(len(exact.table), np.nan, np.float32)
        scores[rows] = exact.rescore(query_vectors, rows)
        results.append(exact.table.best(scores, query))
    return results


# ------------------------------------------------------------------ writing


def write_coarse(
    store: VectorStore,
    folder: Path,
    stage: Stage,
    pool_factor: int = POOL_FACTOR,
    candidates: int = CANDIDATES,
) -> CoarseRecord:
    """Write a stage's files for a store into `folder`, measure its recall and write that, too."""
    if stage == "int8":
        write_codes(store, folder)
        settings = {}
    else:
        write_pooled(store, folder, pool_factor)
        settings = {"pool_factor": pool_factor, "candidates": candidates}
    search = open_stage(store, folder, stage, candidates)
    recall, count = measured_recall(MaxSim(store.shards, store.table), search, store)
    record = CoarseRecord(stage=stage, recall=recall, depth=SAMPLE_DEPTH, queries=count, **settings)
    (folder / COARSE_FILE).write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return record


def write_codes(store: VectorStore, folder: Path) -> None:
    """`codes.bin`: int8, a code for each stored number, in the order of the shards; `scales.bin`: float64,
    for each page its scale, the largest norm of its vectors, and that of what rounding takes from them."""
    scales = []
    with (folder / CODES_FILE).open("wb") as stream:
        for vectors_SD, _ in _pages(store):
            exact_SD = vectors_SD.double()
            scale = code_scale(float(exact_SD.abs().amax())) if len(exact_SD) else 1.0
            codes_SD = (exact_SD / scale).round().to(torch.int8)
            stream.write(codes_SD.numpy().tobytes())
            lost_SD = exact_SD - codes_SD.double() * scale
            norms = (torch.linalg.vector_norm(x, dim=1) for x in (exact_SD, lost_SD))
            scales.append((scale, *(float(n.amax()) if len(n) else np.nan for n in norms)))
    np.array(scales, "<f8").reshape(-1, 3).T.tofile(folder / SCALES_FILE)


def write_pooled(store: VectorStore, folder: Path, factor: int) -> None:
    """`pooled.bin`: pooled vectors as float16, in the order of the shards; `pooled_offsets.bin`: int64."""
    counts = [0]
    with (folder / POOLED_FILE).open("wb") as stream:
        for pooled in pooled_pages(store, factor):
            stream.write(pooled.tobytes())
            counts.append(len(pooled))
    np.cumsum(counts).astype("<i8").tofile(folder / POOLED_OFFSETS_FILE)


def pooled_pages(store: VectorStore, factor: int) -> Iterator[np.ndarray]:
    """`pool_tokens` of every page of every shard, in order; of a deleted page none. Works ahead by a few."""
    threads = torch.get_num_threads()
    waiting: list[Future[np.ndarray]] = []
    with worker_pool(threads) as pool:
        for vectors_SD, alive in _pages(store):
            waiting.append(pool.submit(pool_tokens, vectors_SD[: len(vectors_SD) * alive], factor))
            if len(waiting) > AHEAD * threads:
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()


def _pages(store: VectorStore) -> Iterator[tuple[torch.Tensor, bool]]:
    """The vectors of every page of every shard, and whether it is part of the generation."""
    for shard in store.shards:
        vectors = as_tensor(shard.vectors)
        for first, end, row in zip(shard.offsets[:-1], shard.offsets[1:], shard.rows, strict=True):
            yield vectors[int(first) : int(end)], bool(row >= 0)


# ------------------------------------------------------------------ opening


def open_stage(
    store: VectorStore,
    folder: Path,
    stage: Stage,
    candidates: int = CANDIDATES,
    threads: int | None = None,
) -> Search:
    """The search of a store with a stage whose files are in `folder`."""
    if stage == "int8":
        return MaxSim(store.shards, store.table, threads, codes=_read_codes(store, folder))
    assert stage == "pooled"
    exact = MaxSim(store.shards, store.table, threads)
    pooled = MaxSim([read_pooled(store, folder)], store.table, threads)
    return PooledSearch(exact, pooled, candidates)


def coarse_folder(store: VectorStore) -> Path:
    return store.path / GENERATIONS / str(store.generation)


def read_record(store: VectorStore) -> CoarseRecord | None:
    """What stage an index has; None when it has none. ValueError when its record is damaged."""
    file = coarse_folder(store) / COARSE_FILE
    if not file.is_file():
        return None
    try:
        return CoarseRecord.model_validate_json(file.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise ValueError(f"{file} is damaged ({error.errors()[0]['msg']}); rebuild the index") from None


def read_pooled(store: VectorStore, folder: Path) -> PooledShard:
    """The pooled vectors of a store, memory-mapped."""
    rows = np.concatenate([shard.rows for shard in store.shards])
    offsets = np.fromfile(folder / POOLED_OFFSETS_FILE, "<i8")
    if len(offsets) != len(rows) + 1:
        raise ValueError(f"{folder / POOLED_OFFSETS_FILE} does not fit the index; rebuild it")
    vectors = _map(folder / POOLED_FILE, "<f2", int(offsets[-1]), store.identity.dimension)
    return PooledShard(vectors, offsets, rows)


def _read_codes(store: VectorStore, folder: Path) -> StoredCodes:
    rows = np.concatenate([shard.rows for shard in store.shards])
    scales = np.fromfile(folder / SCALES_FILE, "<f8")
    if len(scales) != 3 * len(rows):
        raise ValueError(f"{folder / SCALES_FILE} does not fit the index; rebuild it")
    ends = np.cumsum([len(shard.vectors) for shard in store.shards])
    codes = _map(folder / CODES_FILE, "i1", int(ends[-1]), store.identity.dimension)
    return StoredCodes(np.split(codes, ends[:-1]), *scales.reshape(3, -1))


def measured_recall(exact: MaxSim, search: Search, store: VectorStore) -> tuple[float, int]:
    """Recall of a search against the exact one, and the number of queries: vectors of pages spread over the
    store, each searched among the other pages."""
    pages = np.flatnonzero([len(exact.page(row).vectors_TD) > 0 for row in range(len(store.table))])
    sample = pages[np.linspace(0, len(pages) - 1, min(SAMPLE, len(pages))).astype(int)] if len(pages) else []
    vectors, queries = [], []
    for row in sample:
        page_TD = exact.page(row).vectors_TD
        tokens = np.linspace(0, len(page_TD) - 1, min(SAMPLE_TOKENS, len(page_TD))).astype(int)
        vectors.append(QueryVectors(page_TD[tokens].astype(np.float32)))
        queries.append(Query("", SAMPLE_DEPTH, frozenset([store.table.page_ids[row]])))
    right = total = 0
    for wanted, got in zip(exact.search(vectors, queries), search.search(vectors, queries), strict=True):
        right += len({hit.page_id for hit in wanted} & {hit.page_id for hit in got})
        total += len(wanted)
    return (right / total if total else 1.0), len(queries)


def _map(file: Path, dtype: str, rows: int, dimension: int) -> np.ndarray:
    expected = rows * dimension * np.dtype(dtype).itemsize
    size = file.stat().st_size
    if size != expected:
        raise ValueError(f"{file} is damaged: it has {size} bytes, not {expected}; rebuild the index")
    if not rows:
        return np.zeros((0, dimension), dtype)
    return np.memmap(file, dtype, mode="r", shape=(rows, dimension))
