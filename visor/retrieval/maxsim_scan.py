"""A fast scan that bounds the MaxSim score of every page from below and above.

Pages and queries are rounded to 8-bit integers times a scale, whose products processors add up exactly and
several times as fast as floating-point numbers. For a query vector q, a page vector p and what they are
rounded to, q' and p',

    |⟨q', p'⟩ − ⟨q, p⟩| = |⟨q' − q, p'⟩ + ⟨q, p' − p⟩| ≤ ‖q' − q‖ ‖p'‖ + ‖q‖ ‖p' − p‖    (Cauchy–Schwarz)

The differences are known, so their norms are measured, not estimated. A max over a page's tokens errs by no
more than the worst of its terms, and the sum over the query's tokens by no more than the sum of theirs. Where
the processor has no fast exact product of 8-bit integers, the scan computes in float32: nothing is rounded,
and a sum of D products errs by at most γ ‖q‖ ‖p‖ with γ = D 2⁻²⁴ / (1 − D 2⁻²⁴), in any order (Higham 2002,
section 3.1).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from visor.retrieval import maxsim_kernels
from visor.retrieval.maxsim_kernels import (
    Block,
    Precision,
    RoundedQueries,
    as_tensor,
    code_scale,
    fastest_precision,
    filled_up,
    products_are_exact,
)


class ShardVectors(Protocol):
    """The part of a store's shard that is scored; see `visor.retrieval.maxsim.MaxSim`."""

    @property
    def vectors(self) -> np.ndarray: ...
    @property
    def offsets(self) -> np.ndarray: ...
    @property
    def rows(self) -> np.ndarray: ...


@dataclass(frozen=True)
class StoredCodes:
    """What the vectors of an index are rounded to: code × scale of the page. P: pages of all shards."""

    codes: Sequence[np.ndarray]
    """For each shard (tokens, D), int8."""
    scale_P: np.ndarray
    norm_P: np.ndarray
    """Largest norm of a page's vectors; NaN for a page without tokens."""
    lost_P: np.ndarray
    """Largest norm of what rounding takes from one of them."""


class PageScanner:
    """Scores the pages of some shards, with bounds. P: pages in the order of the shards ("slots")."""

    def __init__(
        self,
        shards: Sequence[ShardVectors],
        pool: ThreadPoolExecutor,
        threads: int,
        precision: Precision | None = None,
        codes: StoredCodes | None = None,
    ):
        """`precision`: None: the fastest. `codes`: what the vectors are rounded to, if that is stored."""
        self._pool, self._threads = pool, threads
        self._shards = [as_tensor(shard.vectors) for shard in shards]
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
        # A page's scale, and the largest norm of its vectors and of what rounding takes from them; NaN for a
        # page without tokens.
        self._scale_P = np.ones(len(self.rows_P))
        self._norm_P = np.full(len(self.rows_P), np.nan)
        self._lost_P = np.full(len(self.rows_P), np.nan)
        self._codes: list[torch.Tensor] | None = None
        self._measured = False
        if codes is not None and self._in_integers():
            self._codes = [as_tensor(shard_codes) for shard_codes in codes.codes]
            self._scale_P, self._norm_P, self._lost_P = codes.scale_P, codes.norm_P, codes.lost_P
            self._measured = True
        self._measuring = threading.Lock()

    def vectors(self, slot: int) -> torch.Tensor:
        """The vectors of a page (S, D), float16, in the index's own memory."""
        shard = int(np.searchsorted(self._first_page, slot, side="right")) - 1
        offsets, page = self._offsets[shard], slot - self._first_page[shard]
        return self._shards[shard][offsets[page] : offsets[page + 1]]

    def bounds(self, queries: Sequence[torch.Tensor], wanted_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Bounds from below and above (Q, P), float64, of the scores of the wanted pages; NaN for others.

        `queries`: (T, D) float32 each, T at least 1. Wanted pages must have tokens. Without stored codes the
        first call measures the index, which takes two more reads of it.
        """
        rounded = RoundedQueries(queries, self._in_integers())
        score_QP = self._scores(rounded, wanted_P)
        # The norms are computed in float32, and so is a scan in float32; the exact score rounds, too.
        gamma = 4 * (self.dimension + 16) * 2.0**-24
        norm_P = self._norm_P * (1 + gamma) + self._lost_P
        lost_P = self._lost_P * (1 + gamma) + self._norm_P * 2.0**-21
        if self._in_integers():
            # A number halfway between two codes may get either, as the instructions used depend on its place;
            # and a number divided by the scale is rounded to float32.
            lost_P += self._scale_P * self.dimension**0.5 * 2.0**-13
        with np.errstate(invalid="ignore"):  # of pages with numbers that are infinite
            error_QP = rounded.lost_Q[:, None] * norm_P + rounded.norm_Q[:, None] * lost_P
            error_QP += gamma * (rounded.norm_Q + rounded.lost_Q)[:, None] * norm_P + 2.0**-100
            error_QP *= 1 + gamma
        return score_QP - error_QP, score_QP + error_QP

    def scores(self, queries: Sequence[torch.Tensor], wanted_P: np.ndarray) -> np.ndarray:
        """The scan's own scores (Q, P), float64, of the wanted pages; NaN for others. See `bounds`."""
        return self._scores(RoundedQueries(queries, self._in_integers()), wanted_P)

    def _scores(self, rounded: RoundedQueries, wanted_P: np.ndarray) -> np.ndarray:
        self._measure()
        score_QP = np.full((len(rounded.starts), len(wanted_P)), np.nan)

        def scan(block: Block, shard: int, first: int, end: int) -> None:
            slots, vectors_SD, page_starts = self._pages(shard, first, end)
            if self._codes is None:
                pages_SD = block.load(vectors_SD, self._scale_P[slots.start])
            else:
                start = int(self._offsets[shard][first])
                pages_SD = self._codes[shard][start : start + filled_up(len(vectors_SD))]
            maxima_QP = block.scores(rounded, pages_SD, len(vectors_SD), page_starts)
            score_QP[:, slots] = maxima_QP * self._scale_P[slots]

        self._each_block(scan, wanted_P)
        return score_QP

    def _in_integers(self) -> bool:
        return (self._precision or fastest_precision(self.dimension)) == "int8"

    def _measure(self) -> None:
        """Find the scale of each shard, then the norms of its pages and of what rounding takes from them."""
        with self._measuring:
            if self._measured:
                return
            filled_P = self.lengths_P > 0
            if self._in_integers():
                largest_P = np.zeros(len(filled_P))

                def find_largest(block: Block, shard: int, first: int, end: int) -> None:
                    slots, vectors_SD, _ = self._pages(shard, first, end)
                    low, high = torch.aminmax(block.in_float(vectors_SD))
                    largest_P[slots] = max(-float(low), float(high))

                self._each_block(find_largest, filled_P)
                for shard in range(len(self._shards)):
                    pages = slice(self._first_page[shard], self._first_page[shard + 1])
                    self._scale_P[pages] = code_scale(float(largest_P[pages].max(initial=0.0)))

            def measure(block: Block, shard: int, first: int, end: int) -> None:
                slots, vectors_SD, page_starts = self._pages(shard, first, end)
                scale = self._scale_P[slots.start]
                norms_S, lost_S = block.norms(vectors_SD, scale)
                self._norm_P[slots] = np.maximum.reduceat(norms_S, page_starts) * scale
                self._lost_P[slots] = np.maximum.reduceat(lost_S, page_starts) * scale

            self._each_block(measure, filled_P)
            self._measured = True

    def _pages(self, shard: int, first: int, end: int) -> tuple[slice, torch.Tensor, np.ndarray]:
        """Slots, vectors (S, D) and first vector of each page of a block."""
        offsets = self._offsets[shard]
        slots = slice(self._first_page[shard] + first, self._first_page[shard] + end)
        vectors_SD = self._shards[shard][offsets[first] : offsets[end]]
        return slots, vectors_SD, offsets[first:end] - offsets[first]

    def _each_block(self, work: Callable[[Block, int, int, int], None], wanted_P: np.ndarray) -> None:
        """Do `work` for every block of wanted pages, shared out between the threads."""
        blocks = iter(list(self._blocks(wanted_P)))
        in_integers = self._in_integers()

        def take_blocks(_: int) -> None:
            block = Block(self.dimension, in_integers)
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
                    limit = offsets[first] + maxsim_kernels.BLOCK_TOKENS
                    fitting = int(np.searchsorted(offsets, limit, side="right")) - 1
                    last = min(max(fitting, first + 1), end)
                    yield shard, first, last
                    first = last
