"""A fast scan that bounds the MaxSim score of every page from below and above.

Pages and queries are rounded to 8-bit integers times a scale, whose products processors add up exactly and
several times as fast as floating-point numbers. For a query vector q, a page vector p and what they are rounded
to, q' and p',

    |⟨q', p'⟩ − ⟨q, p⟩| = |⟨q' − q, p'⟩ + ⟨q, p' − p⟩| ≤ ‖q' − q‖ ‖p'‖ + ‖q‖ ‖p' − p‖      (Cauchy–Schwarz)

The differences are known, so their norms are measured, not estimated. A max over a page's tokens errs by no more
than the worst of its terms, and the sum over the query's tokens by no more than the sum of theirs. Where the
processor has no fast exact product of 8-bit integers, the scan computes in float32: nothing is rounded, and the
sums of D products err by at most γ ‖q‖ ‖p‖ with γ = D 2⁻²⁴ / (1 − D 2⁻²⁴), in any order (Higham 2002, section 3.1).
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Literal, Protocol

import numpy as np
import torch

Precision = Literal["int8", "float32"]
BLOCK_TOKENS = 8192
"""Page vectors scored at a time: a block's copies stay in the processor's cache. A longer page is one block."""
SHAPE_STEP = 512
"""Blocks are filled up to a multiple of this: libraries compile a kernel for each shape of a product."""
LARGEST_CODE = 127
ROUNDER = 1.5 * 2**23
"""Added to a float32 of at most 2²² in size, leaves the nearest integer in the low bits of the sum."""
_thread_setting = threading.Lock()


class ShardVectors(Protocol):
    """The part of a store's shard that is scored; see `visor.retrieval.maxsim.MaxSim`."""

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
        torch.get_num_threads()  # the first question in a thread gives it the common setting
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


@cache
def fastest_precision(dimension: int) -> Precision:
    """Which scan is the faster here. "int8" only if its products are exact: without the instructions for them
    (VNNI) a library may add pairs of products in 16 bits, which overflow."""
    if not products_are_exact(dimension):
        return "float32"
    left_TD = torch.ones(32, dimension, dtype=torch.int8)
    right_SD = torch.ones(BLOCK_TOKENS, dimension, dtype=torch.int8)
    left_as_float, right_as_float = left_TD.float(), right_SD.float()
    integers = _seconds(lambda: _int8_products(left_TD, right_SD))
    floats = _seconds(lambda: torch.mm(left_as_float, right_as_float.t()))
    return "int8" if integers < floats else "float32"


@cache
def products_are_exact(dimension: int) -> bool:
    """True when this processor and torch multiply vectors of 8-bit integers exactly; tried on some."""
    random = torch.Generator().manual_seed(0)
    left_TD, right_SD = (
        torch.randint(-LARGEST_CODE, LARGEST_CODE + 1, (count, dimension), dtype=torch.int8, generator=random)
        for count in (33, 2 * SHAPE_STEP)
    )
    left_TD[0] = right_SD[0] = LARGEST_CODE
    left_TD[1] = -LARGEST_CODE
    expected = torch.mm(left_TD.double(), right_SD.double().t())
    try:
        return torch.equal(_int8_products(left_TD, right_SD).double(), expected)
    except (AttributeError, RuntimeError):
        return False


def _seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def _int8_products(left_TD: torch.Tensor, right_SD: torch.Tensor, out: torch.Tensor | None = None):
    """⟨left, right⟩ of int8 in int32, (T, S)."""
    if out is None:
        return torch._int_mm(left_TD, right_SD.t())
    return torch._int_mm(left_TD, right_SD.t(), out=out)


class PageScanner:
    """Scores the pages of some shards, with bounds. P: pages in the order of the shards ("slots")."""

    def __init__(
        self,
        shards: Sequence[ShardVectors],
        pool: ThreadPoolExecutor,
        threads: int,
        precision: Precision | None = None,
    ):
        self._pool, self._threads = pool, threads
        self._shards = [_tensor(shard.vectors) for shard in shards]
        self._first_page = np.concatenate([[0], np.cumsum([len(shard.rows) for shard in shards])]).astype(int)
        self._offsets = [np.asarray(shard.offsets, np.int64) for shard in shards]
        none = np.empty(0, np.int64)
        self.rows_P = np.concatenate([none, *(shard.rows for shard in shards)])
        self.lengths_P = np.concatenate([none, *map(np.diff, self._offsets)])
        self.dimension = self._shards[0].shape[1] if shards else 0
        if precision == "int8" and not products_are_exact(self.dimension):
            raise ValueError(
                f"vectors of {self.dimension} numbers cannot be scanned in int8 here; use float32"
            )
        self._precision = precision
        self._scales = [1.0] * len(shards)
        # Largest norm of a page's vectors and of what rounding takes from them; NaN for a page without tokens.
        self._norm_P = np.full(len(self.rows_P), np.nan)
        self._lost_P = np.full(len(self.rows_P), np.nan)
        self._measured = False
        self._measuring = threading.Lock()

    def vectors(self, slot: int) -> torch.Tensor:
        """The vectors of a page (S, D), float16, in the index's own memory."""
        shard = int(np.searchsorted(self._first_page, slot, side="right")) - 1
        offsets, page = self._offsets[shard], slot - self._first_page[shard]
        return self._shards[shard][offsets[page] : offsets[page + 1]]

    def bounds(self, queries: Sequence[torch.Tensor], wanted_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Bounds from below and above (Q, P), float64, of the scores of the wanted pages; NaN for others.

        `queries`: (T, D) float32 each, T at least 1. Wanted pages must have tokens. The first call measures the
        index, which takes two more reads of it.
        """
        self._measure()
        rounded = _RoundedQueries(queries, self._in_integers())
        score_QP = np.full((len(queries), len(wanted_P)), np.nan)

        def scan(block: _Block, shard: int, first: int, end: int) -> None:
            slots, vectors_SD, page_starts = self._pages(shard, first, end)
            tokens = len(block.load(vectors_SD, self._scales[shard]))
            score_QP[:, slots] = block.scores(rounded, tokens, page_starts) * self._scales[shard]

        self._each_block(scan, wanted_P)
        return self._bounds(rounded, score_QP)

    def _in_integers(self) -> bool:
        return (self._precision or fastest_precision(self.dimension)) == "int8"

    def _bounds(self, rounded: _RoundedQueries, score_QP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # The norms are computed in float32, and so are the sums of a scan in float32; the exact score rounds, too.
        gamma = 4 * (self.dimension + 16) * 2.0**-24
        norm_P = self._norm_P * (1 + gamma) + self._lost_P
        lost_P = self._lost_P * (1 + gamma) + self._norm_P * 2.0**-21
        if self._in_integers():
            # A number halfway between two codes may get either, as the instructions used depend on its place.
            scales_P = np.repeat(self._scales, np.diff(self._first_page))
            lost_P += scales_P * self.dimension**0.5 * 2.0**-13
        error_QP = rounded.lost_Q[:, None] * norm_P + rounded.norm_Q[:, None] * lost_P
        error_QP += gamma * (rounded.norm_Q + rounded.lost_Q)[:, None] * norm_P + 2.0**-100
        error_QP *= 1 + gamma
        return score_QP - error_QP, score_QP + error_QP

    def _measure(self) -> None:
        """Find the scale of each shard, then the norms of its pages and of what rounding takes from them."""
        with self._measuring:
            if self._measured:
                return
            filled_P = self.lengths_P > 0
            if self._in_integers():
                largest_P = np.zeros(len(filled_P))

                def find_largest(block: _Block, shard: int, first: int, end: int) -> None:
                    slots, vectors_SD, _ = self._pages(shard, first, end)
                    low, high = torch.aminmax(block.in_float(vectors_SD))
                    largest_P[slots] = max(-float(low), float(high))

                self._each_block(find_largest, filled_P)
                for shard in range(len(self._shards)):
                    pages = slice(self._first_page[shard], self._first_page[shard + 1])
                    largest = float(largest_P[pages].max(initial=0.0))
                    self._scales[shard] = largest / LARGEST_CODE if 0 < largest < np.inf else 1.0

            def measure(block: _Block, shard: int, first: int, end: int) -> None:
                slots, vectors_SD, page_starts = self._pages(shard, first, end)
                norms_S, lost_S = block.norms(vectors_SD, self._scales[shard])
                self._norm_P[slots] = np.maximum.reduceat(norms_S, page_starts) * self._scales[shard]
                self._lost_P[slots] = np.maximum.reduceat(lost_S, page_starts) * self._scales[shard]

            self._each_block(measure, filled_P)
            self._measured = True

    def _pages(self, shard: int, first: int, end: int) -> tuple[slice, torch.Tensor, np.ndarray]:
        """Slots, vectors (S, D) and first vector of each page of a block."""
        offsets = self._offsets[shard]
        slots = slice(self._first_page[shard] + first, self._first_page[shard] + end)
        vectors_SD = self._shards[shard][offsets[first] : offsets[end]]
        return slots, vectors_SD, offsets[first:end] - offsets[first]

    def _each_block(self, work: Callable[[_Block, int, int, int], None], wanted_P: np.ndarray) -> None:
        """Do `work` for every block of wanted pages, shared out between the threads."""
        blocks = iter(list(self._blocks(wanted_P)))
        in_integers = self._in_integers()

        def take_blocks(_: int) -> None:
            block = _Block(self.dimension, in_integers)
            for shard, first, end in blocks:
                work(block, shard, first, end)

        list(self._pool.map(take_blocks, range(self._threads)))

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


class _RoundedQueries:
    """The vectors of some queries as the scan takes them, with the norms that the bounds need.

    `norm_Q` and `lost_Q`: sums over a query's vectors of their norms, and of the norms of what rounding takes.
    """

    def __init__(self, queries: Sequence[torch.Tensor], in_integers: bool):
        exact_TD = torch.cat(list(queries)).double()
        self.starts = np.cumsum([0, *(len(query_TD) for query_TD in queries[:-1])])
        self.scales_T1 = torch.ones(len(exact_TD), 1, dtype=torch.float64)
        if in_integers:
            largest_T1 = exact_TD.abs().amax(dim=1, keepdim=True)
            self.scales_T1 = torch.where(largest_T1 > 0, largest_T1 / LARGEST_CODE, self.scales_T1)
            self.vectors_TD = (exact_TD / self.scales_T1).round().to(torch.int8)
        else:
            self.vectors_TD = exact_TD.float()
        difference_TD = exact_TD - self.vectors_TD.double() * self.scales_T1
        self.norm_Q = self._sum(torch.linalg.vector_norm(exact_TD, dim=1))
        self.lost_Q = self._sum(torch.linalg.vector_norm(difference_TD, dim=1))

    def _sum(self, values_T: torch.Tensor) -> np.ndarray:
        return np.add.reduceat(values_T.numpy(), self.starts)


class _Block:
    """One thread's buffers, and what it computes of a block of pages. Rows after the block's own are left over
    from other blocks; they fill up a product's shape and no page contains them."""

    def __init__(self, dimension: int, in_integers: bool):
        self._in_integers = in_integers
        self._allocate(BLOCK_TOKENS, dimension)
        self._dots = torch.empty(0)
        self._rounder = torch.tensor([ROUNDER])

    def _allocate(self, tokens: int, dimension: int) -> None:
        self._floats = torch.zeros(tokens, dimension)
        self._codes = torch.zeros(tokens, dimension, dtype=torch.int8)

    def in_float(self, vectors_SD: torch.Tensor) -> torch.Tensor:
        """A copy in float32, valid until the next call."""
        if len(vectors_SD) > len(self._floats):
            self._allocate(-(-len(vectors_SD) // SHAPE_STEP) * SHAPE_STEP, vectors_SD.shape[1])
        return self._floats[: len(vectors_SD)].copy_(vectors_SD)

    def load(self, vectors_SD: torch.Tensor, scale: float) -> torch.Tensor:
        """The vectors as the scan takes them, divided by `scale`; valid until the next call."""
        floats_SD = self.in_float(vectors_SD)
        if not self._in_integers:
            return floats_SD
        torch.add(self._rounder, floats_SD, alpha=1 / scale, out=floats_SD)
        return self._codes[: len(vectors_SD)].copy_(floats_SD.view(torch.int32))

    def norms(self, vectors_SD: torch.Tensor, scale: float) -> tuple[np.ndarray, np.ndarray]:
        """Norms of the vectors and of what `load` takes from them, (S,) each, both divided by `scale`."""
        loaded_SD = self.load(vectors_SD, scale)
        exact_SD = vectors_SD.double() / scale
        lost_SD = exact_SD - loaded_SD
        return tuple(torch.linalg.vector_norm(x, dim=1).numpy() for x in (exact_SD, lost_SD))

    def scores(self, queries: _RoundedQueries, tokens: int, page_starts: np.ndarray) -> np.ndarray:
        """Sums over each query's tokens of their maxima over the pages of the `tokens` vectors loaded last,
        (Q, pages), float64, divided by the pages' scale."""
        queries_TD = queries.vectors_TD
        pages_SD = self._codes if self._in_integers else self._floats
        pages_SD = pages_SD[: -(-tokens // SHAPE_STEP) * SHAPE_STEP]
        count = len(queries_TD) * len(pages_SD)
        if count > len(self._dots):
            self._dots = torch.empty(count, dtype=torch.int32 if self._in_integers else torch.float32)
        dots_TS = self._dots[:count].view(len(queries_TD), len(pages_SD))
        if self._in_integers:
            _int8_products(queries_TD, pages_SD, out=dots_TS)
        else:
            torch.mm(queries_TD, pages_SD.t(), out=dots_TS)
        maxima_TP = np.maximum.reduceat(dots_TS.numpy()[:, :tokens], page_starts, axis=1)
        return np.add.reduceat(maxima_TP * queries.scales_T1.numpy(), queries.starts, axis=0)


def _tensor(vectors: np.ndarray) -> torch.Tensor:
    """The same memory as a tensor; that it is read-only makes torch warn, and nothing here writes to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(np.asarray(vectors))
