"""A scan in bfloat16 that bounds the MaxSim score of every page from below and above.

For a query vector q, a page vector p and their roundings q', p' to bfloat16 (both of norm at most …' below),

    |⟨q', p'⟩ − ⟨q, p⟩| = |⟨q' − q, p'⟩ + ⟨q, p' − p⟩| ≤ ‖q' − q‖ ‖p'‖ + ‖q‖ ‖p' − p‖      (Cauchy–Schwarz)

The differences are known exactly, so their norms are measured, not estimated. The product of two bfloat16
numbers is exact in float32; summing D of them in float32, in any order, errs by at most γ ‖q'‖ ‖p'‖, where
γ = D 2⁻²⁴ / (1 − D 2⁻²⁴) (Higham 2002, section 3.1). The sum is then rounded to bfloat16, to nearest, which is
monotone: the greatest rounded value is the rounded greatest value, with a relative error of at most 2⁻⁸. A max
over a page's tokens errs by no more than its terms, and the sum over the query's tokens by the sum of theirs.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch

BLOCK_TOKENS = 4096
"""Page vectors scored at a time: a block's copies stay in the processor's cache. A longer page is one block."""
ROUNDING = 2.0**-8
"""Largest relative error of rounding to bfloat16 (8 significant bits), to nearest."""
TINY = 2.0**-100
"""Covers products too small for float32, which processors may take as 0."""
_thread_setting = threading.Lock()


class ShardVectors(Protocol):
    """The part of a store's shard that is scored; see `MaxSim`."""

    @property
    def vectors(self) -> np.ndarray: ...
    @property
    def offsets(self) -> np.ndarray: ...
    @property
    def rows(self) -> np.ndarray: ...


def worker_pool(threads: int) -> ThreadPoolExecutor:
    """Threads in each of which torch computes on one core; torch's setting for others stays as it is."""
    started = threading.Barrier(threads + 1)

    def start() -> None:
        torch.set_num_threads(1)
        started.wait()

    with _thread_setting:
        before = torch.get_num_threads()
        pool = ThreadPoolExecutor(threads, "maxsim", initializer=start)
        for _ in range(threads):
            pool.submit(int)
        started.wait()
        torch.set_num_threads(before)
    return pool


class PageScanner:
    """Scores every page of the shards in bfloat16, with bounds. P: pages in the order of the shards."""

    def __init__(self, shards: Sequence[ShardVectors], pool: ThreadPoolExecutor, threads: int):
        self._pool, self._threads = pool, threads
        self._shards = [_tensor(shard.vectors) for shard in shards]
        self._first_page = np.concatenate([[0], np.cumsum([len(shard.rows) for shard in shards])])
        self._offsets = [np.asarray(shard.offsets, np.int64) for shard in shards]
        self.rows_P = np.concatenate([np.empty(0, np.int64), *(shard.rows for shard in shards)])
        self.lengths_P = np.concatenate([np.empty(0, np.int64), *map(np.diff, self._offsets)])
        self.dimension = self._shards[0].shape[1] if shards else 0
        # Largest norm of a page's vectors and of what rounding takes from them; NaN until a scan meets the page.
        self._norm_P = np.full(len(self.rows_P), np.nan)
        self._lost_P = np.full(len(self.rows_P), np.nan)

    def vectors(self, slot: int) -> torch.Tensor:
        """The vectors of a page (S, D), float16, in the index's own memory."""
        shard = int(np.searchsorted(self._first_page, slot, side="right")) - 1
        offsets, page = self._offsets[shard], slot - self._first_page[shard]
        return self._shards[shard][offsets[page] : offsets[page + 1]]

    def bounds(self, queries: Sequence[torch.Tensor], wanted_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Bounds from below and above (Q, P), float64, of the scores of the wanted pages; NaN for others.

        `queries`: (T, D) float32 each. Wanted pages must have tokens.
        """
        filled = [i for i, query_TD in enumerate(queries) if len(query_TD)]
        score_QP = np.full((len(queries), len(wanted_P)), np.nan)
        size_QP = np.full((len(queries), len(wanted_P)), np.nan)
        blocks = iter(list(self._blocks(wanted_P)))
        if filled:
            query_TD = torch.cat([queries[i] for i in filled])
            starts = np.cumsum([0, *(len(queries[i]) for i in filled[:-1])])
            rounded_TD = query_TD.bfloat16()

            def work(_: int) -> None:
                scan = _BlockScan(rounded_TD, starts)
                for shard, first, end in blocks:
                    slots = slice(self._first_page[shard] + first, self._first_page[shard] + end)
                    score_QP[filled, slots], size_QP[filled, slots] = self._scan(scan, shard, first, end, slots)

            list(self._pool.map(work, range(self._threads)))
        errors_QP = self._errors(queries, size_QP)
        return score_QP - errors_QP, score_QP + errors_QP

    def _blocks(self, wanted_P: np.ndarray) -> Iterator[tuple[int, int, int]]:
        """Shard, first page and page after the last of runs of wanted pages of about BLOCK_TOKENS."""
        for shard, offsets in enumerate(self._offsets):
            wanted = wanted_P[self._first_page[shard] : self._first_page[shard + 1]]
            edges = np.flatnonzero(np.diff(np.concatenate([[False], wanted, [False]]).astype(np.int8)))
            for first, end in edges.reshape(-1, 2).tolist():
                while first < end:
                    fits = int(np.searchsorted(offsets, offsets[first] + BLOCK_TOKENS, side="right")) - 1
                    last = min(max(fits, first + 1), end)
                    yield shard, first, last
                    first = last

    def _scan(self, scan: _BlockScan, shard: int, first: int, end: int, slots: slice):
        offsets = self._offsets[shard]
        vectors_SD = self._shards[shard][offsets[first] : offsets[end]]
        page_starts = offsets[first:end] - offsets[first]
        exact_SD, rounded_SD = scan.load(vectors_SD)
        if np.isnan(self._norm_P[slots]).any():
            norms_S = torch.linalg.vector_norm(exact_SD, dim=1).numpy()
            lost_S = torch.linalg.vector_norm(exact_SD.sub_(rounded_SD), dim=1).numpy()
            self._norm_P[slots] = np.maximum.reduceat(norms_S, page_starts)
            self._lost_P[slots] = np.maximum.reduceat(lost_S, page_starts)
        return scan.scores(rounded_SD, page_starts)

    def _errors(self, queries: Sequence[torch.Tensor], size_QP: np.ndarray) -> np.ndarray:
        """Bound on |score of the scan − exact score|, (Q, P); the formula of this module's head, summed over T.

        `size_QP`: sums of the absolute values of the maxima.
        """
        # The norms were themselves computed in float32.
        slack = 1 + self.dimension * 2.0**-22
        lost_P = self._lost_P * slack
        norm_P = self._norm_P * slack + lost_P
        # Twice γ for this scan's sums and once more for the exact score's own, which are more accurate.
        gamma = 3 * (self.dimension + 8) * 2.0**-24
        errors_QP = np.empty_like(size_QP)
        for i, query_TD in enumerate(queries):
            exact_TD = query_TD.double()
            norm = float(torch.linalg.vector_norm(exact_TD, dim=1).sum())
            lost = float(torch.linalg.vector_norm(exact_TD - query_TD.bfloat16().double(), dim=1).sum())
            relative = ROUNDING / (1 - ROUNDING) + (len(query_TD) + 8) * 2.0**-22
            errors_QP[i] = lost * norm_P + norm * lost_P + gamma * (norm + lost) * norm_P
            errors_QP[i] += relative * size_QP[i] + TINY * (len(query_TD) + norm)
        return errors_QP


class _BlockScan:
    """One thread's buffers, and the scores of a block of pages."""

    def __init__(self, queries_TD: torch.Tensor, query_starts: np.ndarray):
        self._queries_TD, self._query_starts = queries_TD, query_starts
        self._allocate(BLOCK_TOKENS)

    def _allocate(self, tokens: int) -> None:
        count, dimension = self._queries_TD.shape
        self._exact_SD = torch.empty(tokens, dimension)
        self._rounded_SD = torch.empty(tokens, dimension, dtype=torch.bfloat16)
        self._dots = torch.empty(count * tokens, dtype=torch.bfloat16)
        self._dots_in_float = torch.empty(count * tokens)

    def load(self, vectors_SD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies in float32 and bfloat16, valid until the next block."""
        tokens = len(vectors_SD)
        if tokens > len(self._exact_SD):
            self._allocate(tokens)
        # By way of float32: torch converts float16 to bfloat16 one number at a time.
        exact_SD = self._exact_SD[:tokens].copy_(vectors_SD)
        return exact_SD, self._rounded_SD[:tokens].copy_(exact_SD)

    def scores(self, vectors_SD: torch.Tensor, page_starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sums over a query's tokens of the maxima, and of their absolute values; (Q, pages), float64."""
        shape = len(self._queries_TD), len(vectors_SD)
        count = shape[0] * shape[1]
        dots_TS = torch.mm(self._queries_TD, vectors_SD.t(), out=self._dots[:count].view(shape))
        in_float_TS = self._dots_in_float[:count].view(shape).copy_(dots_TS)
        maxima_TP = np.maximum.reduceat(in_float_TS.numpy(), page_starts, axis=1).astype(np.float64)
        score = np.add.reduceat(maxima_TP, self._query_starts, axis=0)
        return score, np.add.reduceat(np.abs(maxima_TP), self._query_starts, axis=0)


def _tensor(vectors: np.ndarray) -> torch.Tensor:
    """The same memory as a tensor; that it is read-only makes torch warn, and nothing here writes to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(np.asarray(vectors))
