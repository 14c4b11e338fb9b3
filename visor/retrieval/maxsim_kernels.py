"""What one thread computes of a block of page vectors, in 8-bit integers or float32; see `maxsim_scan`.

Axes in names: T query tokens, S page tokens, D dimension, Q queries.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Literal

import numpy as np
import torch

Precision = Literal["int8", "float32"]
BLOCK_TOKENS = 8192
"""Page vectors scored at a time: copies stay in the processor's cache. A longer page is one block."""
SHAPE_STEP = 512
"""Blocks are filled up to a multiple of this: libraries compile a kernel for each shape of a product."""
LARGEST_CODE = 127
ROUNDER = 1.5 * 2**23
"""Added to a float32 of at most 2²² in size, leaves the nearest integer in the low bits of the sum."""
_thread_setting = threading.Lock()


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
    integers = _seconds(lambda: int8_products(left_TD, right_SD))
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
        return torch.equal(int8_products(left_TD, right_SD).double(), expected)
    except (AttributeError, RuntimeError):
        return False


def _seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def int8_products(left_TD: torch.Tensor, right_SD: torch.Tensor, out: torch.Tensor | None = None):
    """⟨left, right⟩ of int8 in int32, (T, S)."""
    if out is None:
        return torch._int_mm(left_TD, right_SD.t())
    return torch._int_mm(left_TD, right_SD.t(), out=out)


class RoundedQueries:
    """The vectors of some queries as the scan takes them, with the norms that the bounds need.

    `norm_Q`, `lost_Q`: sums over a query's vectors of their norms, and of the norms of what rounding takes.
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


class Block:
    """One thread's buffers, and what it computes of a block of pages. Rows behind the block's own are left
    over from other blocks; they fill up the shape of a product, and no page contains them."""

    def __init__(self, dimension: int, in_integers: bool):
        self._in_integers = in_integers
        self._allocate(BLOCK_TOKENS, dimension)
        self._dots = torch.empty(0)
        self._rounder = torch.tensor([ROUNDER])

    def _allocate(self, tokens: int, dimension: int) -> None:
        self._floats = torch.zeros(filled_up(tokens), dimension)
        self._codes = torch.zeros(filled_up(tokens), dimension, dtype=torch.int8)

    def in_float(self, vectors_SD: torch.Tensor) -> torch.Tensor:
        """A copy in float32, valid until the next call."""
        if len(vectors_SD) > len(self._floats):
            self._allocate(*vectors_SD.shape)
        return self._floats[: len(vectors_SD)].copy_(vectors_SD)

    def load(self, vectors_SD: torch.Tensor, scale: float) -> torch.Tensor:
        """The vectors as the scan takes them, divided by `scale`, filled up; valid until the next call."""
        floats_SD = self.in_float(vectors_SD)
        if not self._in_integers:
            return self._floats[: filled_up(len(vectors_SD))]
        torch.add(self._rounder, floats_SD, alpha=1 / scale, out=floats_SD)
        self._codes[: len(vectors_SD)].copy_(floats_SD.view(torch.int32))
        return self._codes[: filled_up(len(vectors_SD))]

    def norms(self, vectors_SD: torch.Tensor, scale: float) -> tuple[np.ndarray, np.ndarray]:
        """Norms of the vectors and of what `load` takes from them, (S,) each, both divided by `scale`."""
        if not self._in_integers:
            norms_S = torch.linalg.vector_norm(self.in_float(vectors_SD), dim=1)
            return norms_S.numpy(), np.zeros(len(vectors_SD))
        codes_SD = self.load(vectors_SD, scale)[: len(vectors_SD)]
        floats_SD = self.in_float(vectors_SD).mul_(1 / scale)
        norms_S = torch.linalg.vector_norm(floats_SD, dim=1)
        lost_S = torch.linalg.vector_norm(floats_SD.sub_(codes_SD), dim=1)
        return norms_S.numpy(), lost_S.numpy()

    def scores(
        self, queries: RoundedQueries, pages_SD: torch.Tensor, tokens: int, page_starts: np.ndarray
    ) -> np.ndarray:
        """Sums over each query's tokens of their maxima over pages, (Q, pages), float64, divided by the
        pages' scale. Of `pages_SD`, the first `tokens` vectors count."""
        queries_TD = queries.vectors_TD
        count = len(queries_TD) * len(pages_SD)
        if count > len(self._dots):
            self._dots = torch.empty(count, dtype=torch.int32 if self._in_integers else torch.float32)
        dots_TS = self._dots[:count].view(len(queries_TD), len(pages_SD))
        if self._in_integers:
            int8_products(queries_TD, pages_SD, out=dots_TS)
        else:
            torch.mm(queries_TD, pages_SD.t(), out=dots_TS)
        maxima_TP = np.maximum.reduceat(dots_TS.numpy()[:, :tokens], page_starts, axis=1)
        return np.add.reduceat(maxima_TP * queries.scales_T1.numpy(), queries.starts, axis=0)


def code_scale(largest: float) -> float:
    """What a code of 1 stands for when numbers of at most `largest` in size are rounded to codes."""
    return largest / LARGEST_CODE if 0 < largest < np.inf else 1.0


def filled_up(tokens: int) -> int:
    return -(-tokens // SHAPE_STEP) * SHAPE_STEP


def as_tensor(vectors: np.ndarray) -> torch.Tensor:
    """The same memory as a tensor; that it is read-only makes torch warn, and nothing here writes to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(np.asarray(vectors))
