"""Late interaction (Khattab and Zaharia 2020, section 3): exact MaxSim search over shards of page vectors.

    score(query, page) = Σ_t max_s ⟨q_t, p_s⟩        t: tokens of the query, s: tokens of the page

Nothing is ever padded, and a page without tokens matches nothing. A search takes two steps. `maxsim_scan`
gives every page a score of low precision and a proven bound on its error; then pages are scored exactly, the
most promising first, until no page left can reach the k-th best score by its bound. The result is that of
scoring every page exactly.

Axes in names: T query tokens, S page tokens, D dimension, Q queries, P pages of the index in the order of the
shards ("slots").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from visor.retrieval.base import Query, ScoredPage
from visor.retrieval.encoding import PageVectors, QueryVectors
from visor.retrieval.maxsim_kernels import Precision, worker_pool
from visor.retrieval.maxsim_scan import PageScanner, ShardVectors, StoredCodes
from visor.retrieval.selection import PageTable

SCAN_TOKENS = 1024
"""At most this many query vectors are scored in one pass over the index; more queries take more passes."""
RESCORE_STEP = 8
"""Pages scored exactly between two looks at the k-th best score, for each thread."""


def maxsim_score(query: QueryVectors, page: PageVectors) -> float:
    """The exact score of a page for a query; NaN for a page without tokens.

    Each dot product is summed in double precision and rounded to float32, and so is the sum over the query's
    tokens. So the score does not depend on the order of a page's tokens, on the batch or on the number of
    threads, as it would if a matrix product in float32 ordered its sums by the shapes it is given.
    """
    if not isinstance(query, QueryVectors) or not isinstance(page, PageVectors):
        raise TypeError(
            f"maxsim_score takes QueryVectors, then PageVectors; got {type(query).__name__} and "
            f"{type(page).__name__}"
        )
    vectors_SD = torch.from_numpy(np.array(page.vectors_TD))
    return _score(_query_in_double(query, vectors_SD.shape[1]), vectors_SD)


def _query_in_double(query: QueryVectors, dimension: int) -> torch.Tensor:
    vectors_TD = np.asarray(query.vectors_TD, np.float32)
    if vectors_TD.ndim != 2 or (len(vectors_TD) and vectors_TD.shape[1] != dimension):
        raise ValueError(
            f"the query's vectors have the shape {vectors_TD.shape}, "
            f"the index holds vectors of {dimension} numbers"
        )
    if not np.isfinite(vectors_TD).all():
        raise ValueError("the query's vectors hold numbers that are infinite or not numbers")
    return torch.from_numpy(vectors_TD.astype(np.float64))


def _score(query_TD: torch.Tensor, vectors_SD: torch.Tensor) -> float:
    if not len(vectors_SD):
        return float("nan")
    # By way of float32, which is exact: torch converts float16 to double one number at a time.
    dots_TS = torch.mm(query_TD, vectors_SD.float().double().t())
    # Rounding is monotone: the greatest rounded product is the greatest one, rounded.
    return float(dots_TS.amax(dim=1).float().double().sum().float())


class MaxSim:
    """Exact search over an index whose vectors lie in shards; may be called from several threads.

    `shards` have `vectors` (tokens, D) float16, `offsets` (pages + 1), int64: a page's tokens are
    `vectors[offsets[i]:offsets[i + 1]]`, and `rows` (pages), int64: a page's row in `table`, −1 for a page
    that was deleted. `threads` (default: as many as torch uses) share the work of one search. `precision` and
    `codes` are of the scan.
    """

    def __init__(
        self,
        shards: Sequence[ShardVectors],
        table: PageTable,
        threads: int | None = None,
        precision: Precision | None = None,
        codes: StoredCodes | None = None,
    ):
        self.table = table
        self.threads = threads or torch.get_num_threads()
        self._pool: ThreadPoolExecutor = worker_pool(self.threads)
        self._scanner = PageScanner(shards, self._pool, self.threads, precision, codes)
        self._slots = np.full(len(table), -1, np.int64)
        live_P = self._scanner.rows_P >= 0
        self._slots[self._scanner.rows_P[live_P]] = np.flatnonzero(live_P)

    @property
    def dimension(self) -> int:
        return self._scanner.dimension

    def search(self, vectors: Sequence[QueryVectors], queries: Sequence[Query]) -> list[list[ScoredPage]]:
        """The best pages of each query (`k`, excluded pages and documents are taken from `queries`).

        Raises ValueError for vectors of another dimension and for numbers that are not finite.
        """
        results: list[list[ScoredPage]] = [[] for _ in queries]
        for batch, tensors, allowed_QP in self._passes(vectors, queries):
            bounds = self._scanner.bounds([q.float() for q in tensors], np.any(allowed_QP, axis=0))
            for i, query_TD, allowed_P, lower_P, upper_P in zip(
                batch, tensors, allowed_QP, *bounds, strict=True
            ):
                scores = self._best(query_TD, queries[i].k, np.flatnonzero(allowed_P), lower_P, upper_P)
                results[i] = self.table.best(scores, queries[i])
        return results

    def candidates(
        self, vectors: Sequence[QueryVectors], queries: Sequence[Query], count: int
    ) -> list[np.ndarray]:
        """Rows of at least the `count` (or the query's k) best pages of each query by the scan's own scores,
        unordered; fewer where fewer are allowed."""
        results = [np.empty(0, np.int64) for _ in queries]
        for batch, tensors, allowed_QP in self._passes(vectors, queries):
            score_QP = self._scanner.scores([q.float() for q in tensors], np.any(allowed_QP, axis=0))
            for i, allowed_P, score_P in zip(batch, allowed_QP, score_QP, strict=True):
                slots, wanted = np.flatnonzero(allowed_P), max(count, queries[i].k)
                if wanted < len(slots):
                    scores = np.nan_to_num(score_P[slots], nan=np.inf)
                    slots = slots[np.argpartition(-scores, wanted - 1)[:wanted]]
                results[i] = self._scanner.rows_P[slots]
        return results

    def rescore(self, query: QueryVectors, rows: np.ndarray) -> np.ndarray:
        """The exact scores of pages by their rows in the table, float32; NaN for a page without tokens."""
        query_TD = _query_in_double(query, self.dimension)
        return self._exact(query_TD, self._slots[rows])

    def page(self, row: int) -> PageVectors:
        """The vectors of a page, a view of the index."""
        return PageVectors(self._scanner.vectors(int(self._slots[row])).numpy())

    def _passes(
        self, vectors: Sequence[QueryVectors], queries: Sequence[Query]
    ) -> Iterator[tuple[list[int], list[torch.Tensor], np.ndarray]]:
        """Indices, vectors and allowed pages (Q, P) of the queries that share a pass over the index. Queries
        without vectors or with k = 0 take none."""
        in_double = [_query_in_double(query, self.dimension) for query in vectors]
        wanted = [i for i, query in enumerate(queries) if len(in_double[i]) and query.k > 0]
        for batch in _batches(wanted, [len(query_TD) for query_TD in in_double]):
            allowed_QP = np.stack([self._allowed(queries[i]) for i in batch])
            yield batch, [in_double[i] for i in batch], allowed_QP

    def _allowed(self, query: Query) -> np.ndarray:
        """Mask (P,) of the pages with tokens that a query may return."""
        rows_P = self._scanner.rows_P
        allowed_P = (rows_P >= 0) & (self._scanner.lengths_P > 0)
        mask = self.table.allowed(query)
        return allowed_P if mask is None else allowed_P & mask[rows_P]

    def _best(
        self, query_TD: torch.Tensor, k: int, slots: np.ndarray, lower_P: np.ndarray, upper_P: np.ndarray
    ) -> np.ndarray:
        """Exact scores, by row of the table, of at least the best k of `slots`; NaN for all others."""
        scores = np.full(len(self.table), np.nan, np.float32)
        upper = upper_P[slots]
        if k < len(slots):
            # A page that k others beat, whatever the errors are, is out; one whose bound is no number is in.
            kept = ~(upper < _greatest(lower_P[slots], k))
            slots, upper = slots[kept], upper[kept]
        upper = np.where(np.isnan(upper), np.inf, upper)
        order = np.argsort(-upper, kind="stable")
        found = np.empty(0, np.float32)
        step = RESCORE_STEP * self.threads
        for start in range(0, len(order), step):
            if len(found) >= k and upper[order[start]] < _greatest(found, k):
                break
            some = slots[order[start : start + step]]
            exact = self._exact(query_TD, some)
            scores[self._scanner.rows_P[some]] = exact
            found = np.concatenate([found, exact[~np.isnan(exact)]])
        return scores

    def _exact(self, query_TD: torch.Tensor, slots: np.ndarray) -> np.ndarray:
        parts = np.array_split(slots, min(self.threads, max(1, len(slots) // 2)))
        scored = self._pool.map(
            lambda part: [_score(query_TD, self._scanner.vectors(slot)) for slot in part.tolist()], parts
        )
        return np.array([score for part in scored for score in part], np.float32)


def _greatest(values: np.ndarray, k: int) -> float:
    """The k-th greatest of at least k values; what is no number counts as the least."""
    values = np.where(np.isnan(values), -np.inf, values)
    return float(np.partition(values, len(values) - k)[len(values) - k])


def _batches(indices: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Consecutive indices of queries with at most SCAN_TOKENS vectors together (or one query)."""
    batches: list[list[int]] = []
    total = 0
    for i in indices:
        if not batches or total + lengths[i] > SCAN_TOKENS:
            batches.append([])
            total = 0
        batches[-1].append(i)
        total += lengths[i]
    return batches
