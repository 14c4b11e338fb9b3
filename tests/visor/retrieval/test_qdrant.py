"""Qdrant's own engine in this process."""

import json
import subprocess
import sys

import numpy as np
import pytest
from store_helpers import MemoryCorpus, TextEncoder

from visor.retrieval.base import Query
from visor.retrieval.encoding import QueryVectors
from visor.retrieval.generations import open_vectors
from visor.retrieval.index import build_index, open_index
from visor.retrieval.qdrant import open_collection, write_collection

pytest.importorskip("qdrant_edge", reason="qdrant-edge-py is not installed")


class QueryEncoder(TextEncoder):
    def encode_queries(self, texts):
        return [QueryVectors(self.vectors(text)) for text in texts]


@pytest.fixture
def corpus():
    rng = np.random.default_rng(0)
    texts = [["x" * int(n) + str(n) for n in rng.integers(0, 40, 10)] for _ in range(6)]
    return MemoryCorpus({f"doc{i}": [*document, ""] for i, document in enumerate(texts)})


@pytest.fixture
def encoder():
    return QueryEncoder(dimension=16)


QUERIES = [
    Query("grapes", 5),
    Query("the fox", 4, exclude_page_ids=frozenset({"doc1#page=3", "doc0#page=1", "doc9#page=1"})),
    Query("crow", 8, doc_ids=frozenset({"doc2", "doc5", "nowhere"})),
    Query("crow", 8, exclude_page_ids=frozenset({"doc2#page=2"}), doc_ids=frozenset({"doc2"})),
    Query("crow", 8, doc_ids=frozenset()),
    Query(" ", 5),
    Query("stork", 0),
    Query("hen", 500),
]


def test_with_candidates_enough_it_finds_what_exact_search_finds(corpus, encoder, tmp_path):
    report = build_index(corpus, tmp_path, "colqwen", encoder=encoder, coarse="qdrant")
    assert "coarse stage qdrant (vectors pooled by 9, 100 candidates" in report.notes[-1]
    retriever = open_index(tmp_path, corpus, encoder=encoder)
    exact = open_index(tmp_path, corpus, encoder=encoder, coarse="exact")
    assert retriever.stage == "qdrant"
    assert retriever.search_batch(QUERIES) == exact.search_batch(QUERIES)


def test_few_candidates_are_scored_exactly(corpus, encoder, tmp_path):
    build_index(corpus, tmp_path, "colqwen", encoder=encoder, coarse="qdrant", candidates=3)
    retriever = open_index(tmp_path, corpus, encoder=encoder)
    exact = open_index(tmp_path, corpus, encoder=encoder, coarse="exact")
    scores = {hit.page_id: hit.score for hit in exact.search("the fox", 100)}
    hits = retriever.search("the fox", 2)
    assert [hit.score for hit in hits] == sorted((scores[hit.page_id] for hit in hits), reverse=True)
    assert len(retriever.search("the fox", 7)) == 7, "as many candidates as pages are asked for"


def test_a_collection_of_another_generation_is_refused(corpus, encoder, tmp_path):
    build_index(corpus, tmp_path, "colqwen", encoder=encoder, coarse="qdrant")
    old = (tmp_path / "qdrant" / "collection.json").read_text()
    corpus.documents["doc1"][0] = "changed"
    build_index(corpus, tmp_path, "colqwen", encoder=encoder, coarse="qdrant")
    assert open_index(tmp_path, corpus, encoder=encoder).search("changed", 1)[0].page_id == "doc1#page=1"
    (tmp_path / "qdrant" / "collection.json").write_text(old)
    with pytest.raises(
        ValueError, match=r"qdrant was made from generation 1 .* is at generation 2 .*--coarse"
    ):
        open_index(tmp_path, corpus, encoder=encoder)
    # The vectors themselves serve on, and a build writes the collection anew without encoding a page.
    assert open_index(tmp_path, corpus, encoder=encoder, coarse="exact").search("changed", 1)
    assert build_index(corpus, tmp_path, "colqwen", encoder=encoder, coarse="qdrant").encoded == 0
    assert open_index(tmp_path, corpus, encoder=encoder).search("changed", 1)


def test_what_is_missing_or_damaged_is_named(corpus, encoder, tmp_path):
    build_index(corpus, tmp_path, "colqwen", encoder=encoder)
    store = open_vectors(tmp_path)
    with pytest.raises(ValueError, match=r"has no Qdrant collection; write it with `visor index"):
        open_collection(store)
    write_collection(store)
    file = tmp_path / "qdrant" / "collection.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "points": 3}))
    with pytest.raises(ValueError, match=rf"has {record['points']} points, not 3"):
        open_collection(store)
    file.write_text("{}")
    with pytest.raises(ValueError, match="is damaged"):
        open_collection(store)


def test_two_processes_can_search_one_collection(corpus, encoder, tmp_path):
    build_index(corpus, tmp_path, "colqwen", encoder=encoder, coarse="qdrant")
    search = open_collection(open_vectors(tmp_path))
    script = (
        "import sys, numpy as np\n"
        "from visor.retrieval.generations import open_vectors\n"
        "from visor.retrieval.qdrant import open_collection\n"
        "from visor.retrieval.base import Query\n"
        "from visor.retrieval.encoding import QueryVectors\n"
        "search = open_collection(open_vectors(sys.argv[1]))\n"
        "[hits] = search.search([QueryVectors(np.ones((2, 16), np.float32))], [Query('', 3)])\n"
        "print([(hit.page_id, hit.score) for hit in hits])\n"
    )
    other = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    [hits] = search.search([QueryVectors(np.ones((2, 16), np.float32))], [Query("", 3)])
    assert other.stdout.strip() == str([(hit.page_id, hit.score) for hit in hits])
