"""Which pages of an index a query may return, and the best of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from visor.retrieval.base import Query, ScoredPage
from visor.types import page_sort_key, split_page_id


class PageTable:
    """The page ids of an index in order (document, then number), so that equal scores keep that order."""

    def __init__(self, page_ids: Sequence[str]):
        self.page_ids = list(page_ids)
        assert self.page_ids == sorted(self.page_ids, key=page_sort_key), "page ids must be in order"
        self._rows = {page_id: row for row, page_id in enumerate(self.page_ids)}
        self._documents: dict[str, tuple[int, int]] | None = None

    def __len__(self) -> int:
        return len(self.page_ids)

    def row(self, page_id: str) -> int | None:
        """Position of a page, None when the index does not hold it."""
        return self._rows.get(page_id)

    def excluded(self, query: Query) -> np.ndarray | None:
        """Rows that the query may not return, distinct and ascending, int64; None = every page is allowed."""
        rows = np.array([r for r in map(self._rows.get, query.exclude_page_ids) if r is not None], np.int64)
        if query.doc_ids is not None:
            outside = np.ones(len(self), bool)
            for doc_id in query.doc_ids:
                first, end = self._document_rows().get(doc_id, (0, 0))
                outside[first:end] = False
            outside[rows] = True
            return np.flatnonzero(outside)
        return np.sort(rows) if len(rows) else None

    def allowed(self, query: Query) -> np.ndarray | None:
        """Mask (pages,) of the rows that the query may return; None = all."""
        excluded = self.excluded(query)
        if excluded is None:
            return None
        mask = np.ones(len(self), bool)
        mask[excluded] = False
        return mask

    def best(self, scores_P: np.ndarray, query: Query, minimum: float | None = None) -> list[ScoredPage]:
        """The best pages for a query by a score for each row, ties by row.

        `minimum`: pages with this score or less do not match. Rows of NaN do not match either.
        """
        candidates = ~np.isnan(scores_P)
        if minimum is not None:
            candidates &= scores_P > minimum
        excluded = self.excluded(query)
        if excluded is not None:
            candidates[excluded] = False
        rows = np.flatnonzero(candidates)
        if query.k < len(rows):
            # Every row that ties with the k-th best stays, so that the stable sort below decides.
            place = len(rows) - max(query.k, 1)
            rows = rows[scores_P[rows] >= np.partition(scores_P[rows], place)[place]]
        rows = rows[np.argsort(-scores_P[rows], kind="stable")][: query.k]
        return [ScoredPage(self.page_ids[row], float(scores_P[row])) for row in rows]

    def _document_rows(self) -> dict[str, tuple[int, int]]:
        """Document → first row and row after its last."""
        if self._documents is None:
            documents: dict[str, tuple[int, int]] = {}
            for row, page_id in enumerate(self.page_ids):
                doc_id, _ = split_page_id(page_id)
                first, _ = documents.get(doc_id, (row, row))
                documents[doc_id] = (first, row + 1)
            self._documents = documents
        return self._documents
