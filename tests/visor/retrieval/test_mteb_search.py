from types import SimpleNamespace

import pytest
from PIL import Image
from store_helpers import TextEncoder

from visor.retrieval.mteb_search import MtebSearch, RowCorpus

TASK = {"task_metadata": SimpleNamespace(name="Animals"), "hf_split": "test", "hf_subset": "default"}
CORPUS = [
    {"id": "doc/2", "title": "Birds", "text": "a blue hen"},
    {"id": "10", "text": "a red fox"},
    {"id": "odd#page=7", "body": "another red fox runs"},
]
QUERIES = [{"id": "q1", "text": "red fox"}, {"id": "q2", "text": "hen"}, {"id": "q3", "text": "whale"}]


def test_calls_as_mteb_makes_them(tmp_path):
    model = MtebSearch("bm25", tmp_path)
    with pytest.raises(ValueError, match="index a corpus before"):
        model.search(QUERIES, **TASK, top_k=2, encode_kwargs={}, num_proc=None)
    for _ in range(2):  # a second run finds the folder of the first
        model.index(CORPUS, **TASK, encode_kwargs={"batch_size": 2}, num_proc=None)
    results = model.search(QUERIES, **TASK, top_k=2, encode_kwargs={}, num_proc=None)
    assert {query: list(hits) for query, hits in results.items()} == {
        "q1": ["10", "odd#page=7"],
        "q2": ["doc/2"],
        "q3": [],
    }
    assert results["q1"]["10"] > results["q1"]["odd#page=7"]
    ranked = {"q1": ["odd#page=7"], "q2": ["10"], "q3": []}
    results = model.search(QUERIES, **TASK, top_k=5, encode_kwargs={}, top_ranked=ranked, num_proc=None)
    assert {query: list(hits) for query, hits in results.items()} == {
        "q1": ["odd#page=7"],
        "q2": [],
        "q3": [],
    }
    with pytest.raises(ValueError, match="query 'q9' has no text"):
        model.search([{"id": "q9", "image": None}], **TASK, top_k=1, encode_kwargs={}, num_proc=None)


def test_dense_and_pictures(tmp_path):
    pytest.importorskip("faiss")
    model = MtebSearch("dense", tmp_path, encoder=TextEncoder(kind="single"))
    model.index(CORPUS, **TASK, encode_kwargs={}, num_proc=None)
    assert len(model.search(QUERIES, **TASK, top_k=3, encode_kwargs={}, num_proc=None)["q1"]) == 3
    corpus = RowCorpus([{"id": "p", "image": Image.new("L", (30, 40))}, {"id": "t", "text": "x"}], "pages")
    assert (corpus.page("p#page=1").width, corpus.image("p#page=1").mode) == (30, "RGB")
    with pytest.raises(ValueError, match="document 't' of pages has no image"):
        corpus.image("t#page=1")


def test_the_protocol_is_that_of_the_installed_mteb(tmp_path):
    mteb = pytest.importorskip("mteb")
    from datasets import Dataset

    model = MtebSearch("bm25", tmp_path)
    assert isinstance(model, mteb.SearchProtocol)
    assert model.mteb_model_meta.name == "visor-rag/bm25"
    rows = [{"id": row["id"], "title": "", "text": row.get("text") or row["body"]} for row in CORPUS]
    model.index(Dataset.from_list(rows), **TASK, encode_kwargs={}, num_proc=None)
    found = model.search(Dataset.from_list(QUERIES), **TASK, top_k=1, encode_kwargs={}, num_proc=None)
    assert {query: list(hits) for query, hits in found.items()} == {"q1": ["10"], "q2": ["doc/2"], "q3": []}
