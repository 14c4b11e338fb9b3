"""A corpus in memory and an encoder whose vectors are a function of the text, for tests of the store."""

import hashlib

import numpy as np

from visor.retrieval.encoding import EncoderIdentity, PageVectors, QueryVectors
from visor.types import Page, make_page_id


class MemoryCorpus:
    """`documents`: document → texts of its pages."""

    def __init__(self, documents, name="fables"):
        self.name = name
        self.documents = {doc: list(texts) for doc, texts in documents.items()}

    def pages(self):
        return [
            Page(page_id=make_page_id(d, n), doc_id=d, page_number=n, image="", width=1, height=1, text=text)
            for d, texts in sorted(self.documents.items())
            for n, text in enumerate(texts, start=1)
        ]

    def page(self, page_id):
        return next(page for page in self.pages() if page.page_id == page_id)


class TextEncoder:
    """One vector a character (kind "multi") or one a text ("single"), from a hash; "" gives none. The text
    "zero" gives zeros, "nan" NaN. `asked`: the texts of every page that was encoded."""

    def __init__(self, name="X", kind="multi", dimension=8, **identity):
        self.identity = EncoderIdentity(name=name, kind=kind, dimension=dimension, pooling="none", **identity)
        self.asked = []

    def vectors(self, text):
        count = min(len(text), 1) if self.identity.kind == "single" else len(text)
        if text in ("zero", "nan"):
            return np.full((count, self.identity.dimension), 0.0 if text == "zero" else np.nan, np.float32)
        seed = int.from_bytes(hashlib.sha256(f"{self.identity.name} {text}".encode()).digest()[:4], "big")
        return np.random.default_rng(seed).normal(size=(count, self.identity.dimension)).astype(np.float32)

    def encode_pages(self, pages, store):
        self.asked += [page.text for page in pages]
        return [PageVectors(self.vectors(page.text)) for page in pages]

    def encode_queries(self, texts):
        return [QueryVectors(self.vectors(text)[:1]) for text in texts]

    def libraries(self):
        return {"text-encoder": "1"}


def check_store(store, corpus, encoder):
    """The store holds exactly the pages of the corpus, with the encoder's vectors, wherever they lie."""
    pages = corpus.pages()
    assert store.table.page_ids == [page.page_id for page in pages]
    found = {}
    for shard in store.shards:
        for position, row in enumerate(shard.rows):
            if row >= 0:
                page_id = store.table.page_ids[row]
                assert page_id not in found
                found[page_id] = shard.vectors[shard.offsets[position] : shard.offsets[position + 1]]
    for page in pages:
        expected = encoder.vectors(page.text).astype(store.dtype)
        expected = expected if expected.any() else expected[:0]
        np.testing.assert_array_equal(found[page.page_id], expected)
        np.testing.assert_array_equal(store.page_vectors(page.page_id), expected)
