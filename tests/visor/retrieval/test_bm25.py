import json
import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from visor.retrieval.base import ScoredPage, rank
from visor.retrieval.bm25 import K1, B, BM25Retriever
from visor.retrieval.tokenizer import tokenize
from visor.types import Page, make_page_id


def page(doc_id, number, text, caption=""):
    page_id = make_page_id(doc_id, number)
    fields = {"image": "x.jpg", "width": 1, "height": 1, "text": text, "caption": caption}
    return Page(page_id=page_id, doc_id=doc_id, page_number=number, **fields)


def slow_bm25(pages, query):
    """The formula, term by term: idf · tf / (tf + k1 (1 − b + b · length / mean length))."""
    texts = {p.page_id: tokenize(f"{p.text}\n{p.caption}") for p in pages}
    mean = sum(map(len, texts.values())) / len(texts)
    hits = []
    for page_id, terms in texts.items():
        score = 0.0
        for term in tokenize(query):
            documents = sum(term in other for other in texts.values())
            if not documents:
                continue
            idf = math.log(1 + (len(texts) - documents + 0.5) / (documents + 0.5))
            frequency = terms.count(term)
            score += idf * frequency / (frequency + K1 * (1 - B + B * len(terms) / mean))
        if score > 0:
            hits.append(ScoredPage(page_id, score))
    return rank(hits, len(hits))


words = st.lists(st.sampled_from(["red", "blue", "green", "the", "营业"]), max_size=8).map(" ".join)


@settings(max_examples=50, deadline=None)
@given(st.lists(words, min_size=1, max_size=8).filter(any), words)
def test_scores_are_the_formula(texts, query):
    pages = [page("d", n, text) for n, text in enumerate(texts, start=1)]
    got = BM25Retriever.build(pages).search(query, 100)
    expected = {hit.page_id: hit.score for hit in slow_bm25(pages, query)}
    assert {hit.page_id for hit in got} == set(expected)
    assert [hit.score for hit in got] == pytest.approx([expected[hit.page_id] for hit in got], rel=1e-5)
    assert got == rank(got, 100)


def test_by_hand():
    pages = [page("d", 1, "red fox"), page("d", 2, "red red fox fox"), page("d", 3, "blue")]
    hits = BM25Retriever.build(pages).search("blue", 5)
    idf = math.log(1 + 2.5 / 1.5)
    assert hits == [
        ScoredPage("d#page=3", pytest.approx(idf / (1 + 1.5 * (0.25 + 0.75 * 1 / (7 / 3))), rel=1e-6))
    ]


def test_ties_are_broken_by_document_then_number():
    pages = [page(d, n, "same words") for d in ("b", "a") for n in (10, 2, 1)]
    hits = BM25Retriever.build(pages).search("same", 5)
    expected = ["a#page=1", "a#page=2", "a#page=10", "b#page=1", "b#page=2"]
    assert [hit.page_id for hit in hits] == expected


@pytest.mark.parametrize("query", ["", "   \n\t", "?!", "unknownword", "😀‍😀‍😀"])
def test_a_query_without_a_known_word_finds_nothing(query):
    assert BM25Retriever.build([page("d", 1, "red fox")]).search(query, 5) == []


def test_pages_without_a_shared_word_are_no_results():
    retriever = BM25Retriever.build([page("d", 1, "red"), page("d", 2, ""), page("d", 3, "blue")])
    assert [hit.page_id for hit in retriever.search("red", 10)] == ["d#page=1"]
    assert retriever.search("red", 0) == []
    with pytest.raises(ValueError, match="k must be"):
        retriever.search("red", -1)


def test_caption_is_indexed_and_other_scripts_are_found():
    retriever = BM25Retriever.build(
        [page("d", 1, "", caption="A bar chart"), page("d", 2, "营业收入同比增长")]
    )
    assert retriever.search("chart", 1)[0].page_id == "d#page=1"
    assert retriever.search("营业收入同比增长多少？", 1)[0].page_id == "d#page=2"


def test_no_text_at_all_is_refused():
    with pytest.raises(ValueError, match="none of the 1 pages has text"):
        BM25Retriever.build([page("d", 1, " ")])


def test_save_and_load_without_pickle(tmp_path):
    pages = [page("d", n, text) for n, text in enumerate(["red fox", "blue fox", "red hen"], start=1)]
    built = BM25Retriever.build(pages)
    built.save(tmp_path)
    loaded = BM25Retriever.load(tmp_path)
    for query in ("red", "fox hen", "", "x"):
        assert loaded.search(query, 3) == built.search(query, 3)
    assert {path.suffix for path in tmp_path.iterdir()} == {".npy", ".json"}


def test_index_files_do_not_depend_on_the_hash_seed(tmp_path):
    code = """
import sys, hashlib, pathlib
from visor.retrieval.bm25 import BM25Retriever
from visor.types import Page
texts = ["red fox jumps", "blue fox", "red hen sits here"]
pages = [Page(page_id=f"d#page={n}", doc_id="d", page_number=n, image="", width=1, height=1, text=t)
         for n, t in enumerate(texts, 1)]
BM25Retriever.build(pages).save(pathlib.Path(sys.argv[1]))
"""
    contents = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        subprocess.run([sys.executable, "-c", code, folder], check=True, env={"PYTHONHASHSEED": seed})
        contents.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert contents[0] == contents[1]
    assert json.loads(contents[0]["page_ids.json"]) == ["d#page=1", "d#page=2", "d#page=3"]
