import pytest
from store_helpers import MemoryCorpus, TextEncoder

from visor.retrieval.base import Query, ScoredPage
from visor.retrieval.hybrid import HybridRetriever, fuse, hybrid_parts
from visor.retrieval.index import build_index, open_index


def ranking(*page_numbers):
    return [ScoredPage(f"d#page={n}", 100.0 - i) for i, n in enumerate(page_numbers)]


class Fixed:
    """A retriever with one ranking, which applies exclusions and depth as every retriever does."""

    def __init__(self, name, *page_numbers):
        self.name = name
        self.hits = ranking(*page_numbers)
        self.asked = []

    def search_batch(self, queries):
        self.asked += queries
        return [[h for h in self.hits if h.page_id not in q.exclude_page_ids][: q.k] for q in queries]


def test_by_hand():
    hits = fuse([ranking(1, 2, 3), ranking(3, 1)], 10)
    assert hits == [
        ScoredPage("d#page=1", 1 / 61 + 1 / 62),
        ScoredPage("d#page=3", 1 / 63 + 1 / 61),
        ScoredPage("d#page=2", 1 / 62),
    ]


def test_ties_are_broken_by_page():
    hits = fuse([ranking(10, 2), ranking(2, 10), []], 10)
    assert [hit.page_id for hit in hits] == ["d#page=2", "d#page=10"]
    assert hits[0].score == hits[1].score


def test_the_depth_decides_what_is_fused_and_exclusions_are_passed_down():
    first, second = Fixed("one", 1, 2, 3, 4), Fixed("two", 4, 3, 2, 1)
    hybrid = HybridRetriever(first, second, depth=2)
    assert hybrid.name == "hybrid:one+two"
    assert [hit.page_id for hit in hybrid.search("q", 1)] == ["d#page=1"]
    query = Query("q", 4, exclude_page_ids=frozenset({"d#page=1"}), doc_ids=frozenset({"d"}))
    [hits, nothing] = hybrid.search_batch([query, Query("q", 0)])
    assert [hit.page_id for hit in hits] == ["d#page=2", "d#page=4", "d#page=3"]
    assert nothing == []
    assert (first.asked[1].exclude_page_ids, first.asked[1].doc_ids) == (
        query.exclude_page_ids,
        query.doc_ids,
    )
    with pytest.raises(ValueError, match="1 or more"):
        HybridRetriever(first, second, depth=0)


def test_names():
    assert hybrid_parts("hybrid") == ("bm25", "dense")
    assert hybrid_parts("hybrid:colqwen+bm25") == ("colqwen", "bm25")
    assert hybrid_parts("bm25") is None
    for name in ("hybrid:", "hybrid:bm25", "hybrid:bm25+bm25", "hybrid:a+b+c"):
        with pytest.raises(ValueError, match="does not name two retrievers"):
            hybrid_parts(name)


def test_built_of_two_indexes(tmp_path):
    pytest.importorskip("faiss")
    corpus, encoder = MemoryCorpus({"a": ["red fox", "blue hen", "grey wolf"]}), TextEncoder(kind="single")
    build_index(corpus, tmp_path / "bm25")
    with pytest.raises(ValueError, match=r"dense holds no index; make one with `visor index .*dense`"):
        open_index(tmp_path, corpus, "hybrid", encoder=encoder)
    build_index(corpus, tmp_path / "dense", "dense", encoder=encoder)
    hybrid = open_index(tmp_path, corpus, "hybrid:bm25+dense", encoder=encoder, depth=2)
    parts = [open_index(tmp_path / "bm25", corpus), open_index(tmp_path / "dense", corpus, encoder=encoder)]
    assert hybrid.search("blue hen", 2) == fuse([part.search("blue hen", 2) for part in parts], 2)
    assert len(hybrid.search("blue hen", 3)) == 3  # every part is asked for at least k pages
    with pytest.raises(ValueError, match="hybrid has no index of its own; build its parts: bm25 and dense"):
        build_index(corpus, tmp_path / "hybrid", "hybrid")
