"""A retriever of ours as a search model of MTEB (its `SearchProtocol`), to be run on MTEB's retrieval tasks.

    import mteb
    model = MtebSearch("bm25", "runs/mteb")
    mteb.evaluate(model, mteb.get_tasks(tasks=["Vidore3HrRetrieval"]))

Each document of a task is a page of its own. MTEB is not needed to import this module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visor.retrieval.base import BatchRetriever, Query
from visor.retrieval.index import build_index, open_index
from visor.types import Page, make_page_id, page_sort_key, split_page_id

if TYPE_CHECKING:
    from PIL.Image import Image


class RowCorpus:
    """The rows of an MTEB corpus (`id`, and `title`, `text` or `body`, `image` if it has them) as pages."""

    def __init__(self, rows: Iterable[Mapping[str, Any]], name: str):
        self.name = name
        self._rows: dict[str, Mapping[str, Any]] = {}
        pages = []
        for row in rows:
            page_id = make_page_id(str(row["id"]), 1)
            self._rows[page_id] = row
            pages.append(self._page(page_id, row))
        self._pages = {page.page_id: page for page in sorted(pages, key=lambda p: page_sort_key(p.page_id))}

    @staticmethod
    def _page(page_id: str, row: Mapping[str, Any]) -> Page:
        parts = [row.get("title"), row.get("text") or row.get("body")]
        image = row.get("image")
        width, height = image.size if image is not None else (1, 1)
        digest = hashlib.sha256(image.tobytes()).hexdigest() if image is not None else ""
        return Page(
            page_id=page_id,
            doc_id=split_page_id(page_id)[0],
            page_number=1,
            image="",
            width=width,
            height=height,
            text="\n".join(str(part) for part in parts if part),
            sha256=digest,
        )

    def pages(self) -> list[Page]:
        return list(self._pages.values())

    def page(self, page_id: str) -> Page:
        return self._pages[page_id]

    def image(self, page_id: str) -> Image:
        """ValueError for a document without a picture."""
        image = self._rows[page_id].get("image")
        if image is None:
            raise ValueError(f"document {split_page_id(page_id)[0]!r} of {self.name} has no image to encode")
        return image.convert("RGB")

    def document_path(self, doc_id: str) -> Path | None:
        return None


class MtebSearch:
    """Indexes a task's corpus with one of our retrievers and answers its queries."""

    def __init__(self, retriever: str, folder: str | Path, **options: Any):
        """`retriever`: a name as in `visor index`; `folder`: where the indexes of the tasks are kept, so that
        a second run encodes nothing; `options`: those of the retriever's build, such as `encoder`."""
        self._name = retriever
        self._folder = Path(folder)
        self._options = options
        self._retriever: BatchRetriever | None = None

    def index(
        self,
        corpus: Iterable[Mapping[str, Any]],
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        encode_kwargs: Mapping[str, Any] | None = None,
        num_proc: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Build the index of a task's corpus; `encode_kwargs["batch_size"]` is not used."""
        name = f"{task_metadata.name}-{hf_subset}-{hf_split}"
        pages = RowCorpus(corpus, name)
        path = self._folder / name / self._name
        build_index(pages, path, self._name, **self._options)
        opened = {k: v for k, v in self._options.items() if k in ("encoder", "device")}
        self._retriever = open_index(path, pages, self._name, **opened)

    def search(
        self,
        queries: Iterable[Mapping[str, Any]],
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        top_k: int,
        encode_kwargs: Mapping[str, Any] | None = None,
        top_ranked: Mapping[str, Sequence[str]] | None = None,
        num_proc: int | None = None,
        **kwargs: Any,
    ) -> dict[str, dict[str, float]]:
        """Query id → document id → score, at most `top_k` documents; of a query's `top_ranked`, if given.

        ValueError for queries without text, and before `index`.
        """
        if self._retriever is None:
            raise ValueError("index a corpus before searching it")
        rows = list(queries)
        asked = [self._query(row, top_k, top_ranked) for row in rows]
        results = self._retriever.search_batch(asked)
        return {
            str(row["id"]): {split_page_id(hit.page_id)[0]: hit.score for hit in hits}
            for row, hits in zip(rows, results, strict=True)
        }

    @property
    def mteb_model_meta(self) -> Any:
        """MTEB's record of the model; needs MTEB."""
        from mteb.models.model_meta import ModelMeta

        encoder = self._options.get("encoder", "")
        name = self._name if not isinstance(encoder, str) or not encoder else f"{self._name}-{encoder}"
        safe = name.replace("/", "_").replace(":", "-").replace("+", "-")
        return ModelMeta.create_empty(overwrites={"name": f"visor-rag/{safe}"})

    @staticmethod
    def _query(row: Mapping[str, Any], top_k: int, top_ranked: Mapping[str, Sequence[str]] | None) -> Query:
        text = row.get("text")
        if not isinstance(text, str):
            raise ValueError(f"query {row['id']!r} has no text; only text queries are answered")
        documents = None
        if top_ranked is not None:
            documents = frozenset(str(doc_id) for doc_id in top_ranked[row["id"]])
        return Query(text, top_k, doc_ids=documents)
