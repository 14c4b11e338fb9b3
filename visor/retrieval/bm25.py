"""BM25 over page texts (Robertson and Zaragoza 2009; Lucene's non-negative idf), scored by bm25s."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import bm25s

from visor.retrieval.base import Query, ScoredPage
from visor.retrieval.selection import PageTable
from visor.retrieval.tokenizer import TOKENIZER_VERSION, tokenize
from visor.types import Page, page_sort_key

PAGE_IDS_FILE = "page_ids.json"
K1, B = 1.5, 0.75


class BM25Retriever:
    """Ranks the pages of a corpus by the words they share with the query.

    A page that shares none (score 0) is no result, so a search may give fewer than k pages; a query without
    a word (empty, spaces, symbols only) gives none. Equal input gives equal output, on any machine.
    """

    name = "bm25"

    def __init__(self, engine: bm25s.BM25, page_ids: list[str]):
        self._engine = engine
        self._pages = PageTable(page_ids)

    @classmethod
    def build(cls, pages: Sequence[Page]) -> BM25Retriever:
        """Index text and caption of each page. Raises ValueError when there is no page or no word in any."""
        pages = sorted(pages, key=lambda page: page_sort_key(page.page_id))
        tokens = [tokenize(f"{page.text}\n{page.caption}") for page in pages]
        vocabulary = {term: i for i, term in enumerate(sorted({term for page in tokens for term in page}))}
        if not vocabulary:
            raise ValueError(
                f"none of the {len(pages)} pages has text, so BM25 has nothing to index; "
                "add OCR text or use a visual retriever"
            )
        # bm25s would number the terms in the order of a set, which differs from run to run.
        ids = [[vocabulary[term] for term in page] for page in tokens]
        engine = bm25s.BM25(k1=K1, b=B, method="lucene", backend="numpy")
        engine.index((ids, vocabulary), create_empty_token=False, show_progress=False)
        return cls(engine, [page.page_id for page in pages])

    def search(self, query: str, k: int) -> list[ScoredPage]:
        """The best `k` pages with a score above 0, scores descending, ties by document and page number.

        Raises ValueError for a negative k.
        """
        return self.search_batch([Query(query, k)])[0]

    def search_batch(self, queries: Sequence[Query]) -> list[list[ScoredPage]]:
        """The pages of each query; see `search`."""
        return [self._search(query) for query in queries]

    def _search(self, query: Query) -> list[ScoredPage]:
        terms = self._engine.get_tokens_ids(tokenize(query.text))
        if not terms:
            return []
        return self._pages.best(self._engine.get_scores_from_ids(terms), query, minimum=0.0)

    def save(self, folder: Path) -> None:
        """Write the index files (.npy and .json; no pickle)."""
        self._engine.save(folder, show_progress=False)
        (folder / PAGE_IDS_FILE).write_text(json.dumps(self._pages.page_ids), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> BM25Retriever:
        """Read what `save` wrote."""
        engine = bm25s.BM25.load(folder, load_corpus=False, allow_pickle=False)
        return cls(engine, json.loads((folder / PAGE_IDS_FILE).read_text(encoding="utf-8")))

    @staticmethod
    def settings() -> dict[str, str]:
        """What else decides a ranking; an index made with other settings is refused."""
        return {"tokenizer": TOKENIZER_VERSION, "method": "lucene", "k1": str(K1), "b": str(B)}

    @staticmethod
    def libraries() -> dict[str, str]:
        return {"bm25s": version("bm25s"), "numpy": version("numpy")}
