"""Which pages a query may return, against a slow and obvious version."""

from __future__ import annotations

import numpy as np
import pytest

from visor.retrieval.base import Query, ScoredPage, rank
from visor.retrieval.bm25 import BM25Retriever
from visor.retrieval.selection import PageTable
from visor.types import Page, make_page_id, split_page_id

PAGES = [make_page_id(doc, n) for doc in ("a", "b", "c") for n in range(1, 12)]


def slow_best(scores, query, minimum=None):
    hits = []
    for page_id, score in zip(PAGES, scores, strict=True):
        if page_id in query.exclude_page_ids or np.isnan(score):
            continue
        if query.doc_ids is not None and split_page_id(page_id)[0] not in query.doc_ids:
            continue
        if minimum is None or score > minimum:
            hits.append(ScoredPage(page_id, float(score)))
    return rank(hits, query.k)


@pytest.mark.parametrize("seed", range(30))
def test_best_equals_filter_then_sort(seed):
    random = np.random.default_rng(seed)
    scores = random.integers(0, 6, len(PAGES)).astype(np.float32)  # few values: many ties
    scores[random.random(len(PAGES)) < 0.1] = np.nan
    exclude = frozenset(random.choice(PAGES, random.integers(0, 20))) | {"z#page=1"}
    for doc_ids in (None, frozenset({"b"}), frozenset({"a", "c", "unknown"}), frozenset()):
        for k in (0, 1, 5, 100):
            for minimum in (None, 0.0):
                query = Query("q", k, exclude if seed % 2 else frozenset(), doc_ids)
                assert PageTable(PAGES).best(scores, query, minimum) == slow_best(scores, query, minimum)


def test_excluded_pages_make_room_for_the_next():
    """Case F5: what was seen is left out before the best k are taken."""
    table, scores = PageTable(PAGES), np.arange(len(PAGES), dtype=np.float32)
    assert [hit.page_id for hit in table.best(scores, Query("q", 1, frozenset({PAGES[-1]})))] == [PAGES[-2]]
    assert table.best(scores, Query("q", 3, frozenset(PAGES))) == []


def test_pages_out_of_order_are_refused():
    with pytest.raises(AssertionError):
        PageTable(["a#page=10", "a#page=2"])


def test_negative_k_is_refused():
    with pytest.raises(ValueError, match="0 or more"):
        Query("q", -1)


def test_a_query_of_a_batch_never_gets_the_page_of_another():
    """Case F5: A has seen all its pages, B none; they are scored in one batch, B first."""
    pages = [
        Page(
            page_id=f"{doc}#page={n}",
            doc_id=doc,
            page_number=n,
            image="",
            width=1,
            height=1,
            text=text,
        )
        for doc, n, text in [("a", 1, "apples and pears"), ("a", 2, "apples again"), ("b", 1, "bees")]
    ]
    retriever = BM25Retriever.build(pages)
    seen = frozenset({"a#page=1", "a#page=2"})
    found = retriever.search_batch([Query("bees", 5), Query("apples", 5, seen)])
    assert [[hit.page_id for hit in hits] for hits in found] == [["b#page=1"], []]
