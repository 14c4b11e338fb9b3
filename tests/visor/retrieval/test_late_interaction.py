import numpy as np
import pytest
import torch
from store_helpers import MemoryCorpus, TextEncoder

from visor.retrieval.base import Query
from visor.retrieval.coarse import coarse_folder, read_pooled, read_record
from visor.retrieval.encoding import PageVectors, QueryVectors
from visor.retrieval.generations import open_vectors, verify_vectors
from visor.retrieval.index import build_index, open_index
from visor.retrieval.late_interaction import LateInteractionRetriever
from visor.retrieval.maxsim import maxsim_score
from visor.retrieval.maxsim_kernels import products_are_exact
from visor.retrieval.pooling import pool_tokens

STAGES = [None, "int8", "pooled"]


class LetterEncoder(TextEncoder):
    """A vector a character; equal characters have nearly equal vectors, as the blank patches of pages do."""

    def vectors(self, text):
        rng = np.random.default_rng(len(text))
        letters = np.random.default_rng(1).normal(size=(130, self.identity.dimension))
        rows = [letters[ord(c) % 130] + 0.1 * rng.normal(size=self.identity.dimension) for c in text]
        vectors = np.array(rows, np.float32).reshape(len(text), self.identity.dimension)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def encode_queries(self, texts):
        return [QueryVectors(self.vectors(text)) for text in texts]


def words(rng, count):
    return ["".join(chr(97 + int(c)) for c in rng.integers(0, 26, rng.integers(0, 60))) for _ in range(count)]


@pytest.fixture
def corpus():
    rng = np.random.default_rng(0)
    return MemoryCorpus({f"doc{i}": words(rng, 12) for i in range(8)})


@pytest.fixture
def encoder():
    return LetterEncoder(dimension=16)


def by_hand(corpus, encoder, query):
    """Score every page with the exact function, one by one."""
    [vectors] = encoder.encode_queries([query.text])
    scored = [
        (-maxsim_score(vectors, PageVectors(encoder.vectors(page.text).astype(np.float16))), i, page.page_id)
        for i, page in enumerate(corpus.pages())
        if page.text
        and page.page_id not in query.exclude_page_ids
        and (query.doc_ids is None or page.doc_id in query.doc_ids)
    ]
    return [(page_id, -score) for score, _, page_id in sorted(scored)[: query.k]]


QUERIES = [
    Query("maize", 5),
    Query("the fox and the crow", 3, exclude_page_ids=frozenset({"doc1#page=3", "doc9#page=1"})),
    Query("grapes", 8, doc_ids=frozenset({"doc2", "doc5"})),
    Query("  ", 5),
    Query("sour", 0),
    Query("abcdefghij", 200),
]


@pytest.mark.parametrize("stage", STAGES)
def test_a_built_index_finds_what_scoring_every_page_finds(corpus, encoder, tmp_path, stage):
    report = build_index(
        corpus, tmp_path, "colqwen", encoder=encoder, coarse=stage, candidates=100, batch_size=5
    )
    assert report.retriever == "colqwen"
    retriever = open_index(tmp_path, corpus, "colqwen", encoder=encoder, threads=2)
    assert retriever.stage == stage
    results = retriever.search_batch(QUERIES)
    for query, hits in zip(QUERIES, results):
        expected = by_hand(corpus, encoder, query) if query.text.strip() else []
        assert [(hit.page_id, hit.score) for hit in hits] == expected
        assert retriever.search_batch([query]) == [hits]
    assert retriever.search("maize", 5) == results[0]


@pytest.mark.parametrize("stage", STAGES)
def test_changed_and_removed_pages_are_found_as_they_are(corpus, encoder, tmp_path, stage):
    options = {"encoder": encoder, "coarse": stage, "candidates": 100}
    build_index(corpus, tmp_path, "colqwen", **options)
    del corpus.documents["doc3"]
    corpus.documents["doc1"][4] = "quite another text"
    corpus.documents["extra"] = ["xylophone", ""]
    report = build_index(corpus, tmp_path, "colqwen", **options)
    assert (report.encoded, report.removed) == (2, 13), "a page without text was there before"
    assert verify_vectors(tmp_path) == []
    retriever = open_index(tmp_path, corpus, encoder=encoder)
    for text in ("xylophone", "quite another text", "maize"):
        hits = retriever.search(text, 6)
        assert [(hit.page_id, hit.score) for hit in hits] == by_hand(corpus, encoder, Query(text, 6))


def test_the_recall_of_a_stage_is_reported_and_kept(corpus, encoder, tmp_path):
    report = build_index(
        corpus, tmp_path, "colqwen", encoder=encoder, coarse="pooled", pool_factor=30, candidates=5
    )
    record = read_record(open_vectors(tmp_path))
    assert (record.stage, record.pool_factor, record.candidates, record.depth) == ("pooled", 30, 5, 5)
    assert 0 < record.recall < 1
    assert f"recall@5 {record.recall:.3f}" in report.notes[-1]
    # Another build with more candidates encodes nothing and finds more.
    second = build_index(
        corpus, tmp_path, "colqwen", encoder=encoder, coarse="pooled", pool_factor=30, candidates=60
    )
    assert second.encoded == 0
    assert read_record(open_vectors(tmp_path)).recall > record.recall
    retriever = open_index(tmp_path, corpus, encoder=encoder, candidates=2)
    assert retriever._search.candidates == 2


def test_measured_recall_is_that_of_the_search(corpus, encoder, tmp_path):
    """Counted again over the same pages, by the retriever itself."""
    build_index(corpus, tmp_path, "colqwen", encoder=encoder, coarse="pooled", pool_factor=30, candidates=5)
    store = open_vectors(tmp_path)
    exact = LateInteractionRetriever(store, encoder, coarse="exact")
    coarse = LateInteractionRetriever(store, encoder)
    right = total = 0
    for page_id in store.table.page_ids:
        page = store.page_vectors(page_id)
        if not len(page):
            continue
        tokens = np.linspace(0, len(page) - 1, min(20, len(page))).astype(int)
        vectors = [QueryVectors(page[tokens].astype(np.float32))]
        query = [Query("", 5, frozenset({page_id}))]
        wanted = {hit.page_id for hit in exact.nearest(vectors, query)[0]}
        right += len(wanted & {hit.page_id for hit in coarse.nearest(vectors, query)[0]})
        total += len(wanted)
    assert read_record(store).recall == pytest.approx(right / total)


def test_a_stage_that_is_not_there_is_named(corpus, encoder, tmp_path):
    build_index(corpus, tmp_path, "colqwen", encoder=encoder, coarse="int8")
    with pytest.raises(
        ValueError, match=r"no coarse stage 'pooled': it has the stage 'int8'.*--coarse pooled"
    ):
        open_index(tmp_path, corpus, encoder=encoder, coarse="pooled")
    exact = open_index(tmp_path, corpus, encoder=encoder, coarse="exact")
    assert exact.stage is None
    build_index(corpus, tmp_path, "colqwen", encoder=encoder)
    with pytest.raises(ValueError, match="it has none"):
        open_index(tmp_path, corpus, encoder=encoder, coarse="int8")
    with pytest.raises(ValueError, match=r"coarse is 'int4'; known stages: int8, pooled, qdrant"):
        build_index(corpus, tmp_path, "colqwen", encoder=encoder, coarse="int4")
    with pytest.raises(ValueError, match="a pool factor is 2 or more"):
        build_index(corpus, tmp_path, "colqwen", encoder=encoder, coarse="pooled", pool_factor=1)


@pytest.mark.parametrize("file", ["codes.bin", "scales.bin", "pooled.bin", "pooled_offsets.bin"])
def test_a_damaged_stage_is_named(corpus, encoder, tmp_path, file):
    build_index(corpus, tmp_path, "colqwen", encoder=encoder, coarse="pooled" if "pooled" in file else "int8")
    path = coarse_folder(open_vectors(tmp_path)) / file
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{file}.*rebuild"):
        open_index(tmp_path, corpus, encoder=encoder)


def test_an_index_names_its_encoder_or_asks_for_it(corpus, encoder, tmp_path):
    build_index(corpus, tmp_path, "colqwen", encoder=encoder)
    with pytest.raises(ValueError, match="does not name its encoder"):
        open_index(tmp_path, corpus)
    with pytest.raises(ValueError, match="made with encoder 'X', not 'Y'"):
        open_index(tmp_path, corpus, encoder=LetterEncoder("Y", dimension=16))


def test_an_index_of_single_vectors_is_refused(corpus, tmp_path):
    single = TextEncoder(kind="single", dimension=16)
    build_index(corpus, tmp_path, "dense", encoder=single)
    with pytest.raises(ValueError, match="holds one vector a page"):
        LateInteractionRetriever(open_vectors(tmp_path), single)


def test_stored_codes_serve_only_where_their_products_are_exact(corpus, encoder, tmp_path):
    build_index(corpus, tmp_path, "colqwen", encoder=encoder, coarse="int8")
    retriever = open_index(tmp_path, corpus, encoder=encoder)
    in_use = retriever._search._scanner._codes is not None
    assert in_use <= products_are_exact(16)


def test_pooling_keeps_clusters_apart_and_norms():
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(5, 32))
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    groups = np.repeat(np.arange(5), 9)
    tokens = 3 * (centres[groups] + 0.01 * rng.normal(size=(45, 32)))
    pooled = pool_tokens(torch.from_numpy(tokens.astype(np.float16)), 9).astype(np.float32)
    assert pooled.dtype == np.float32
    assert len(pooled) == 5
    np.testing.assert_allclose(pooled, 3 * centres, atol=0.1)


@pytest.mark.parametrize(("tokens", "factor"), [(0, 9), (1, 9), (8, 9), (100, 9), (100, 2)])
def test_pooling_gives_at_most_its_share_of_vectors(tokens, factor):
    vectors = torch.randn(tokens, 8, generator=torch.Generator().manual_seed(0)).half()
    pooled = pool_tokens(vectors, factor)
    assert len(pooled) <= -(-tokens // factor)
    assert len(pooled) >= min(tokens, 1)
    assert np.isfinite(pooled).all()
    np.testing.assert_array_equal(pooled, pool_tokens(vectors, factor))
    equal = torch.ones(tokens, 8).half()
    np.testing.assert_array_equal(pool_tokens(equal, factor)[:1], equal[:1].numpy())


def test_pooled_files_hold_no_page_that_was_deleted(corpus, encoder, tmp_path):
    build_index(corpus, tmp_path, "colqwen", encoder=encoder, coarse="pooled")
    del corpus.documents["doc3"]
    build_index(corpus, tmp_path, "colqwen", encoder=encoder, coarse="pooled")
    store = open_vectors(tmp_path)
    pooled = read_pooled(store, coarse_folder(store))
    dead = pooled.rows < 0
    assert dead.sum() == 12
    assert (np.diff(pooled.offsets)[dead] == 0).all()
