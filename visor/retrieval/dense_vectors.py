"""The single vectors of a store, by row of its page table."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from visor.retrieval.generations import VectorStore

UNIT_ROUNDOFF = 2.0**-24
"""Of float32."""
BLOCK = 4096
"""Vectors in memory at once."""


class DenseVectors:
    """Length: number of pages with a vector. `rows`: their table rows, ascending; a page's place in it is its
    id in FAISS."""

    def __init__(self, store: VectorStore):
        if store.identity.kind != "single":
            raise ValueError(f"the index {store.path} holds several vectors a page; dense search takes one")
        self.dimension = store.identity.dimension
        self._shards = store.shards
        self._shard = np.full(len(store.table), -1, np.int32)
        self._place = np.zeros(len(store.table), np.int64)
        for number, shard in enumerate(store.shards):
            there = (np.diff(shard.offsets) == 1) & (shard.rows >= 0)
            self._shard[shard.rows[there]] = number
            self._place[shard.rows[there]] = shard.offsets[:-1][there]
        self.rows = np.flatnonzero(self._shard >= 0)

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, rows: np.ndarray) -> np.ndarray:
        """float32 (rows, dimension): the vectors of table rows that have one."""
        vectors = np.empty((len(rows), self.dimension), np.float32)
        for number in np.unique(self._shard[rows]):
            mine = self._shard[rows] == number
            vectors[mine] = self._shards[number].vectors[self._place[rows[mine]]]
        return vectors

    def blocks(self) -> Iterator[np.ndarray]:
        """All vectors in the order of `rows`."""
        for start in range(0, len(self), BLOCK):
            yield self.at(self.rows[start : start + BLOCK])

    def scores(self, query_D: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """float64 (rows): inner products, each summed on its own, so that no other row changes its bits.

        The products of float32 numbers are exact in float64.
        """
        query = query_D.astype(np.float64)
        parts = [
            (self.at(rows[start : start + BLOCK]).astype(np.float64) * query).sum(axis=1)
            for start in range(0, len(rows), BLOCK)
        ]
        return np.concatenate(parts) if parts else np.zeros(0)

    def float32_scores(self, query_D: np.ndarray) -> np.ndarray:
        """float32 (table rows): quick inner products within `error_bound`; NaN where there is no vector."""
        scores = np.full(len(self._shard), np.nan, np.float32)
        for number, shard in enumerate(self._shards):
            rows = np.flatnonzero(self._shard == number)
            scores[rows] = (shard.vectors @ query_D)[self._place[rows]]
        return scores

    def error_bound(self, query_D: np.ndarray) -> float:
        """Upper bound on |float32 score − exact score| of any page, for any order of summation.

        γ ‖q‖ ‖x‖ with γ = n u / (1 − n u), n terms (Higham 2002, section 3.1); twice that covers the rounding
        of the norms and of the float64 sums.
        """
        n = self.dimension * UNIT_ROUNDOFF
        return 2 * n / (1 - n) * float(np.linalg.norm(query_D.astype(np.float64))) * self._largest_norm

    @cached_property
    def _largest_norm(self) -> float:
        squares = [np.einsum("pd,pd->p", block, block).max() for block in self.blocks()]
        return float(np.sqrt(max(squares, default=0.0), dtype=np.float64))
