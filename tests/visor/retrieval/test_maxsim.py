import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from visor.retrieval import maxsim, maxsim_kernels
from visor.retrieval.base import Query
from visor.retrieval.encoding import PageVectors, QueryVectors
from visor.retrieval.maxsim import MaxSim, maxsim_score
from visor.retrieval.selection import PageTable

CASES = Path(__file__).resolve().parents[3].parent / "shared" / "cases" / "files"
PRECISIONS = ("int8", "float32")


def slow_score(query_TD, page_SD):
    """MaxSim in float32, one product after another."""
    dots_TS = np.zeros((len(query_TD), len(page_SD)), np.float32)
    for d in range(query_TD.shape[1]):
        dots_TS += query_TD[:, d, None].astype(np.float32) * page_SD[None, :, d].astype(np.float32)
    total = np.float32(0)
    for best in dots_TS.max(axis=1):
        total += best
    return float(total)


def slow_search(query_TD, pages, page_ids, query):
    scored = [
        (-slow_score(query_TD, page), place, page_id)
        for place, (page, page_id) in enumerate(zip(pages, page_ids))
        if len(page)
        and page_id not in query.exclude_page_ids
        and (query.doc_ids is None or page_id.split("#")[0] in query.doc_ids)
    ]
    return [page_id for _, _, page_id in sorted(scored)[: query.k]]


def ids_of(count):
    return [f"doc{i // 4:02d}#page={i % 4 + 1}" for i in range(count)]


def make_index(pages, shard_pages=5, dead=(), **options):
    """A search over pages in shards of a few, with deleted pages in between."""
    live = [i for i in range(len(pages)) if i not in dead]
    rows = {page: row for row, page in enumerate(live)}
    shards = []
    for first in range(0, len(pages), shard_pages):
        some = pages[first : first + shard_pages]
        shards.append(
            SimpleNamespace(
                vectors=np.concatenate(some).astype("<f2"),
                offsets=np.cumsum([0, *map(len, some)]),
                rows=np.array([rows.get(first + i, -1) for i in range(len(some))]),
            )
        )
    all_ids = ids_of(len(pages))
    return MaxSim(shards, PageTable([all_ids[i] for i in live]), **options)


def unit(rng, *shape):
    vectors = rng.standard_normal(shape).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def random_pages(rng, count=23, dimension=32):
    return [unit(rng, int(rng.integers(1, 40)), dimension).astype(np.float16) for _ in range(count)]


def test_the_order_of_query_and_page_counts():
    case = json.loads((CASES / "maxsim_order.json").read_text()) if CASES.is_dir() else None
    if case is None:
        pytest.skip("the shared folder with the case files is absent")
    query = QueryVectors(np.array(case["query"], np.float32))
    names = sorted(case["pages"])
    pages = [np.array(case["pages"][name], np.float16) for name in names]
    for name, page in zip(names, pages):
        assert maxsim_score(query, PageVectors(page)) == pytest.approx(case["right_scores"][name], abs=1e-3)
    hits = make_index(pages).search([query], [Query("", 2)])[0]
    order = dict(zip(ids_of(2), names))
    assert [order[hit.page_id] for hit in hits] == case["right_ranking"]
    with pytest.raises(TypeError, match="takes QueryVectors, then PageVectors"):
        maxsim_score(PageVectors(pages[0]), query)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_search_equals_a_slow_float32_loop(precision):
    rng = np.random.default_rng(0)
    pages = random_pages(rng)
    pages[3] = pages[3][:0]
    index = make_index(pages, dead={7, 8, 22}, precision=precision, threads=2)
    live = [i for i in range(len(pages)) if i not in {7, 8, 22}]
    queries_TD = [unit(rng, int(rng.integers(1, 25)), 32) for _ in range(9)]
    queries = [
        Query("", 5),
        Query("", 1, exclude_page_ids=frozenset({"doc00#page=1", "doc02#page=3", "elsewhere#page=1"})),
        Query("", 100),
        Query("", 3, doc_ids=frozenset({"doc01", "doc04", "nowhere"})),
        Query("", 2, exclude_page_ids=frozenset({"doc01#page=1"}), doc_ids=frozenset({"doc01"})),
        Query("", 0),
        Query("", 4, doc_ids=frozenset()),
        Query("", 20),
        Query("", 7),
    ]
    together = index.search([QueryVectors(query_TD) for query_TD in queries_TD], queries)
    for query_TD, query, hits in zip(queries_TD, queries, together):
        expected = slow_search(query_TD, [pages[i] for i in live], [ids_of(23)[i] for i in live], query)
        assert [hit.page_id for hit in hits] == expected
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
        assert index.search([QueryVectors(query_TD)], [query]) == [hits]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), precision=st.sampled_from(PRECISIONS), k=st.integers(1, 30))
def test_ties_are_broken_by_page_order(seed, precision, k):
    """Coarse numbers, whose sums are exact in any order: most pages tie with others."""
    rng = np.random.default_rng(seed)
    pages = [rng.integers(-2, 3, (int(rng.integers(0, 4)), 3)).astype(np.float16) for _ in range(25)]
    for i in rng.integers(0, 25, 6):
        pages[i] = pages[int(rng.integers(25))][::-1]
    pages[0] = np.ones((1, 3), np.float16)
    query_TD = rng.integers(-2, 3, (int(rng.integers(1, 4)), 3)).astype(np.float32)
    hits = make_index(pages, precision=precision, threads=1).search([QueryVectors(query_TD)], [Query("", k)])
    assert [hit.page_id for hit in hits[0]] == slow_search(query_TD, pages, ids_of(25), Query("", k))


KINDS = ("unit", "large", "denormal", "mixed", "sparse", "equal", "zero", "near")


def adversarial(rng, kind, *shape):
    vectors = rng.standard_normal(shape)
    if kind == "large":
        vectors *= 15000
    elif kind == "denormal":
        vectors *= 2.0**-23
    elif kind == "mixed":
        vectors *= 10.0 ** rng.uniform(-7, 4, shape)
    elif kind == "sparse":
        vectors *= rng.random(shape) < 0.1
    elif kind == "equal":
        vectors[:] = rng.standard_normal()
    elif kind == "zero":
        vectors[:] = 0
    elif kind == "near":  # pages that differ in the last bit of float16
        vectors = 1 + 2.0**-10 * rng.integers(0, 2, shape)
    else:
        vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    precision=st.sampled_from(PRECISIONS),
    page_kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    query_kind=st.sampled_from(KINDS),
    dimension=st.sampled_from((1, 2, 16, 50, 128)),
)
def test_the_bounds_hold_and_the_search_is_that_of_scoring_every_page(
    seed, precision, page_kinds, query_kind, dimension
):
    assume(precision == "float32" or maxsim_kernels.products_are_exact(dimension))
    rng = np.random.default_rng(seed)
    pages = [
        adversarial(rng, page_kinds[i % len(page_kinds)], int(rng.integers(0, 9)), dimension)
        .clip(-65504, 65504)
        .astype(np.float16)
        for i in range(12)
    ]
    query_TD = adversarial(rng, query_kind, int(rng.integers(1, 6)), dimension).astype(np.float32)
    index = make_index(pages, precision=precision, threads=1)
    exact_P = np.array([maxsim_score(QueryVectors(query_TD), PageVectors(page)) for page in pages])
    filled_P = np.array([len(page) > 0 for page in pages])
    lower, upper = index._scanner.bounds([torch.from_numpy(query_TD)], filled_P)
    assert (lower[0, filled_P] <= exact_P[filled_P]).all()
    assert (upper[0, filled_P] >= exact_P[filled_P]).all()
    hits = index.search([QueryVectors(query_TD)], [Query("", 4)])[0]
    order = np.flatnonzero(filled_P)[np.argsort(-exact_P[filled_P], kind="stable")][:4]
    assert [(hit.page_id, hit.score) for hit in hits] == [(ids_of(12)[i], exact_P[i]) for i in order]


def test_the_bound_leaves_few_pages_to_score():
    rng = np.random.default_rng(1)
    pages = [unit(rng, 50, 64).astype(np.float16) for _ in range(400)]
    index = make_index(pages, shard_pages=100, precision="int8", threads=1)
    scored = []
    exact = index._exact
    index._exact = lambda query_TD, slots: scored.extend(slots) or exact(query_TD, slots)
    query = QueryVectors(np.concatenate([pages[37][:8].astype(np.float32), unit(rng, 4, 64)]))
    assert index.search([query], [Query("", 1)])[0][0].page_id == ids_of(400)[37]
    assert len(scored) < 40


def test_a_score_depends_on_neither_token_order_nor_batch_nor_threads():
    rng = np.random.default_rng(2)
    page = unit(rng, 77, 128).astype(np.float16)
    query = QueryVectors(unit(rng, 20, 128))
    score = maxsim_score(query, PageVectors(page))
    assert score == maxsim_score(query, PageVectors(page[::-1]))
    assert score == maxsim_score(query, PageVectors(np.concatenate([page, page[:5]])))
    other = QueryVectors(unit(rng, 3, 128))
    for threads in (1, 2, 3):
        for batch in ([query], [other, query, other]):
            index = make_index([page, page[::-1], page[3:4]], threads=threads)
            hits = index.search(batch, [Query("", 2)] * len(batch))[len(batch) // 2]
            assert [(hit.page_id, hit.score) for hit in hits] == [(i, score) for i in ids_of(2)]


def test_blocks_and_batches_do_not_change_the_result(monkeypatch):
    rng = np.random.default_rng(3)
    pages = random_pages(rng)
    vectors = [QueryVectors(unit(rng, 6, 32)) for _ in range(5)]
    queries = [Query("", 6, exclude_page_ids=frozenset(ids_of(23)[i : i + 2])) for i in range(5)]
    expected = make_index(pages).search(vectors, queries)
    monkeypatch.setattr(maxsim_kernels, "BLOCK_TOKENS", 16)
    monkeypatch.setattr(maxsim_kernels, "SHAPE_STEP", 7)
    monkeypatch.setattr(maxsim, "SCAN_TOKENS", 13)
    assert make_index(pages, threads=3).search(vectors, queries) == expected


def test_an_empty_page_and_an_empty_query_match_nothing():
    page = np.ones((2, 4), np.float16)
    index = make_index([page[:0], page, page[:0]])
    assert [
        hit.page_id for hit in index.search([QueryVectors(page.astype(np.float32))], [Query("", 9)])[0]
    ] == [ids_of(2)[1]]
    assert index.search([QueryVectors(np.empty((0, 4), np.float32))], [Query("", 9)]) == [[]]
    assert math.isnan(maxsim_score(QueryVectors(page), PageVectors(page[:0])))
    assert np.isnan(index.rescore(QueryVectors(page), np.array([0]))).all()
    nothing = make_index([page[:0]])
    assert nothing.search([QueryVectors(page)], [Query("", 9)]) == [[]]


def test_a_page_is_never_padded():
    """Negative scores: a padded page would score 0 beside a longer one."""
    query = QueryVectors(np.array([[1, 0]], np.float32))
    short, long = np.array([[-0.5, 0]], np.float16), np.array([[-0.25, 0], [-1, 0], [-1, 0]], np.float16)
    hits = make_index([short, long]).search([query], [Query("", 2)])[0]
    assert [hit.score for hit in hits] == [-0.25, -0.5]


def test_bad_query_vectors_are_named():
    index = make_index([np.ones((2, 4), np.float16)])
    with pytest.raises(ValueError, match=r"shape \(2, 3\), the index holds vectors of 4 numbers"):
        index.search([QueryVectors(np.ones((2, 3), np.float32))], [Query("", 1)])
    with pytest.raises(ValueError, match="infinite or not numbers"):
        index.search([QueryVectors(np.full((2, 4), np.nan, np.float32))], [Query("", 1)])


def test_a_page_with_numbers_that_are_none_matches_nothing_and_hides_no_other():
    rng = np.random.default_rng(4)
    pages = random_pages(rng, 6)
    pages[2][0, 0] = np.nan
    pages[4][0, 0] = np.inf
    query = QueryVectors(np.abs(unit(rng, 3, 32)))
    for precision in PRECISIONS:
        hits = make_index(pages, precision=precision).search([query], [Query("", 6)])[0]
        assert {hit.page_id for hit in hits} >= {ids_of(6)[i] for i in (0, 1, 3, 5)}
        assert ids_of(6)[2] not in {hit.page_id for hit in hits}


def test_the_threads_of_a_search_leave_the_setting_of_torch():
    before = torch.get_num_threads()
    pool = maxsim_kernels.worker_pool(2)
    assert torch.get_num_threads() == before
    assert pool.submit(torch.get_num_threads).result() == 1


@pytest.mark.parametrize("dimension", [1, 2, 3, 64, 128, 200, 1000])
def test_products_of_codes_are_exact_where_they_are_used(dimension):
    rng = np.random.default_rng(5)
    left, right = (
        torch.from_numpy(rng.integers(-127, 128, (n, dimension)).astype(np.int8)) for n in (9, 512)
    )
    exact = left.numpy().astype(np.int64) @ right.numpy().astype(np.int64).T
    if maxsim_kernels.products_are_exact(dimension):
        assert (maxsim_kernels.int8_products(left, right).numpy() == exact).all()
    else:
        assert maxsim_kernels.fastest_precision(dimension) == "float32"
        with pytest.raises(ValueError, match="cannot be scanned in int8 here"):
            make_index([np.ones((2, dimension))], precision="int8")
