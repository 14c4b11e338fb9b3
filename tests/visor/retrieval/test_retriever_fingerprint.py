"""The two parts of a fingerprint, and the self-check of encoders."""

import numpy as np
import pytest

from rollout import fingerprints
from visor.retrieval.base import ScoredPage
from visor.retrieval.bm25 import BM25Retriever
from visor.retrieval.encoding import EncoderIdentity, QueryVectors
from visor.retrieval.fingerprint import (
    PROBE_QUERIES,
    Fingerprint,
    check_canaries,
    identity_fingerprint,
    retriever_fingerprint,
    take_fingerprint,
)
from visor.types import Page, make_page_id

TEXTS = [
    "annual revenue by region 2020",
    "study participants took part",
    "table of contents",
    "market share largest company",
    "figure growth rate",
    "definition of the term",
    "contact address telephone",
    "年度收入 统计 图表",
]
MANIFEST = {
    "retriever": "dense",
    "corpus": "a",
    "corpus_hash": "c1",
    "files": "files-1",
    "identity": {"name": "m", "weights_hash": "w1", "processor_hash": "p1"},
}


def bm25():
    pages = [
        Page(
            page_id=make_page_id("d.pdf", number),
            doc_id="d.pdf",
            page_number=number,
            image="x",
            width=1,
            height=1,
            text=text,
        )
        for number, text in enumerate(TEXTS, start=1)
    ]
    return BM25Retriever.build(pages)


def test_the_behaviour_of_a_fixed_corpus_is_a_fixed_value():
    """Stored runs depend on it: it changes only with the probes or with what BM25 answers."""
    assert retriever_fingerprint(bm25()) == "5efcbcc5567f3cce"


def test_rollout_has_the_same_function():
    assert fingerprints.retriever_fingerprint is retriever_fingerprint
    assert fingerprints.PROBE_QUERIES is PROBE_QUERIES


def test_the_identity_follows_what_decides_a_ranking_and_nothing_else():
    base = identity_fingerprint(MANIFEST, {"faiss": "1"})
    assert len(base) == 16
    for same in ({"files": "files-2"}, {"corpus": "moved"}, {"created": "today"}, {"generation": 8}):
        assert identity_fingerprint(MANIFEST | same, {"faiss": "1"}) == base
    moved = [MANIFEST | {"settings": {"k1": "2", "encoder": f"st:/models/{place}"}} for place in "ab"]
    assert identity_fingerprint(moved[0]) == identity_fingerprint(moved[1])
    changed = [
        {"corpus_hash": "c2"},
        {"settings": {"k1": "2"}},
        {"identity": MANIFEST["identity"] | {"weights_hash": "w2"}},
        {"identity": MANIFEST["identity"] | {"processor_hash": "p2"}},
    ]
    found = {identity_fingerprint(MANIFEST | other, {"faiss": "1"}) for other in changed}
    found |= {identity_fingerprint(MANIFEST, {"faiss": "2"}), base}
    assert len(found) == 6
    hybrid = {"retriever": "hybrid:bm25+dense", "parts": [MANIFEST, MANIFEST | {"retriever": "bm25"}]}
    moved = {"retriever": "hybrid:bm25+dense", "parts": [{**p, "files": "z"} for p in hybrid["parts"]]}
    assert identity_fingerprint(hybrid) == identity_fingerprint(moved)
    other = hybrid | {"parts": [MANIFEST | {"corpus_hash": "c2"}, hybrid["parts"][1]]}
    assert identity_fingerprint(hybrid) != identity_fingerprint(other)


def test_as_text_and_what_it_matches():
    fingerprint = take_fingerprint(bm25(), MANIFEST)
    assert str(fingerprint).startswith("5efcbcc5567f3cce-")
    assert fingerprint == Fingerprint(*str(fingerprint).split("-"))
    assert fingerprint.matches("5efcbcc5567f3cce")
    assert fingerprint.matches(str(fingerprint))
    assert not fingerprint.matches(fingerprint.identity)
    assert not fingerprint.matches("")


class Encoder:
    """Bags of letters; `drift` moves the vectors of a batch, `pad` adds a row to them."""

    def __init__(self, drift=0.0, pad=False, dtype="float32"):
        self.drift, self.pad = drift, pad
        self.identity = EncoderIdentity(
            name="letters", kind="multi", dimension=26, pooling="none", dtype=dtype
        )

    def encode_queries(self, texts):
        return [QueryVectors(self._vectors(text, len(texts) > 1)) for text in texts]

    def _vectors(self, text, batched):
        rows = [np.bincount([ord(c) % 26 for c in word], minlength=26) for word in text.split()]
        vectors_TD = np.array(rows, np.float32)
        if batched:
            vectors_TD = vectors_TD * np.float32(1 + self.drift)
            if self.pad:
                vectors_TD = np.vstack([vectors_TD, np.zeros((1, 26), np.float32)])
        return vectors_TD

    def libraries(self):
        return {"letters": "1"}


class Vectors:
    """A retriever over an encoder whose batches may break near ties otherwise than single searches."""

    name = "vectors"

    def __init__(self, encoder):
        self.encoder = encoder

    def search_batch(self, queries):
        return [[ScoredPage("d#page=1", 1.0 + 1e-7 * len(queries))] for _ in queries]


class Hybrid:
    name = "hybrid:bm25+vectors"

    def __init__(self, *parts):
        self.parts = parts

    def search_batch(self, queries):
        return [[] for _ in queries]


def test_canaries_pass_within_the_tolerance_of_the_dtype():
    check_canaries(bm25())
    check_canaries(Vectors(Encoder(drift=1e-5)))
    check_canaries(Vectors(Encoder(drift=1e-2, dtype="bfloat16")))
    check_canaries(Hybrid(bm25(), Vectors(Encoder())))


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        (
            Encoder(drift=1e-2),
            r"'letters' gives the query 'annual revenue .*' vectors that differ by 0\.01",
        ),
        (Encoder(drift=0.2, dtype="bfloat16"), r"more than 0\.05"),
        (Encoder(pad=True), r"4 vectors alone and 5 in a batch .* padding"),
    ],
)
def test_an_encoder_that_depends_on_its_batch_is_named(encoder, message):
    with pytest.raises(ValueError, match=message):
        check_canaries(Vectors(encoder))
    with pytest.raises(ValueError, match=message):
        check_canaries(Hybrid(bm25(), Vectors(encoder)))


def test_a_retriever_without_encoder_must_answer_equally():
    class Moody:
        name = "moody"

        def search_batch(self, queries):
            return [[ScoredPage("d#page=1", float(len(queries)))] for _ in queries]

    with pytest.raises(ValueError, match=r"'moody' answers 'annual revenue.*' with other pages"):
        check_canaries(Moody())
