"""Speaks to the search servers of the peers (VRAG-RL, ViDoRAG, VISOR's public code), which name images.

They take `GET /search?queries=…` or `POST /search`, and give a list of images for each query, as
`[[{"image_file": path}]]` or as `{"results": [{"data": [{"file_path": path}], "score": […]}]}`. Theirs give
scores with the second only; ours (`visor serve --peer-protocol`) puts a `score` into each image of the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from visor.retrieval.base import Query, ScoredPage
from visor.retrieval.http_session import HttpSession, RetrievalError
from visor.retrieval.peer_names import PeerNames
from visor.types import Page, split_page_id

PROBE = "table of contents"
MAX_QUERIES, MAX_URL_BYTES = 100, 30_000
"""Of one request; their servers take URLs of up to 64 KiB."""


class PeerProtocol:
    """Their servers know neither exclusions nor filters: those are applied to what they give, which is ten
    pages at most, so fewer than k pages may be left. Where they give no scores, rank r gets 1 / r."""

    name = "peer"
    fingerprint: str | None = None

    def __init__(self, session: HttpSession, pages: Sequence[Page], budget: float):
        """Find out whether the server takes GET or POST. Raises ValueError for ambiguous names."""
        self._names = PeerNames(pages)
        self._session = session
        self._path = "/search" if urlsplit(session.url).path in ("", "/") else ""
        self._method = "GET"
        try:
            self._ask([PROBE], 1, budget)
        except RetrievalError as error:
            if error.status not in (404, 405):
                raise
            self._method = "POST"
            self._ask([PROBE], 1, budget)

    def search(self, queries: Sequence[Query]) -> list[list[ScoredPage]]:
        ranked: list[list[ScoredPage]] = []
        for chunk in _chunks(queries):
            depth = max(query.k + len(query.exclude_page_ids) for query in chunk)
            found = self._ask([query.text for query in chunk], depth)
            ranked += [self._pages(query, images) for query, images in zip(chunk, found)]
        return ranked

    def _ask(
        self, texts: list[str], top_k: int, budget: float | None = None
    ) -> list[list[tuple[str, float]]]:
        """For each text the (image, score) pairs of the server, best first."""
        if self._method == "GET":
            content: dict[str, Any] = {"params": {"queries": texts, "top_k": top_k}}
        else:
            content = {"json": {"queries": texts, "top_k": top_k}}
        response = self._session.request(self._method, self._path, budget, **content)
        try:
            reply = response.json()
            results = reply["results"] if isinstance(reply, dict) else reply
            found = [list(_images(result)) for result in results]
        except (ValueError, KeyError, TypeError) as error:
            raise RetrievalError(
                f"{self._session.url} does not answer as the peers' servers do: {error!r}"
            ) from None
        if len(found) != len(texts):
            raise RetrievalError(f"{self._session.url} gave {len(found)} results for {len(texts)} queries")
        return found

    def _pages(self, query: Query, images: list[tuple[str, float]]) -> list[ScoredPage]:
        hits: dict[str, ScoredPage] = {}
        for image, score in images:
            page_id = self._names.page_id(image)
            if page_id is None:
                raise RetrievalError(
                    f"the search service {self._session.url} returned the image {image!r}, which is no page "
                    "of the local corpus; page 3 of name.pdf is expected as name_3.jpg"
                )
            allowed = query.doc_ids is None or split_page_id(page_id)[0] in query.doc_ids
            if allowed and page_id not in query.exclude_page_ids:
                hits.setdefault(page_id, ScoredPage(page_id, score))
        return list(hits.values())[: query.k]


def _images(result: Any) -> Iterator[tuple[str, float]]:
    """The images of one query's result, in either of the two shapes; texts and videos are left out."""
    items = result["data"] if isinstance(result, dict) else result
    for item, score in zip(items, _scores(result, items)):
        if isinstance(item, str):
            yield item, float(score)
        elif item.get("type", "image") == "image":
            path = item.get("image_file", item.get("file_path"))
            if not isinstance(path, str):
                raise ValueError(f"an image without a path: {item!r:.100}")
            yield path, float(score)


def _scores(result: Any, items: list[Any]) -> list[float]:
    """Those of the reply, when each item has one and they descend (a distance does not); else 1 / rank."""
    scores = result.get("score") if isinstance(result, dict) else None
    if not (isinstance(scores, list) and len(scores) == len(items)):
        scores = [item.get("score") if isinstance(item, dict) else None for item in items]
    numbers = [float(s) for s in scores if isinstance(s, int | float) and math.isfinite(s)]
    if len(numbers) == len(items) and all(a >= b for a, b in pairwise(numbers)):
        return numbers
    return [1 / rank for rank in range(1, len(items) + 1)]


def _chunks(queries: Sequence[Query]) -> Iterator[list[Query]]:
    chunk: list[Query] = []
    size = 0
    for query in queries:
        length = 3 * len(query.text.encode()) + 10  # percent-encoded
        if chunk and (len(chunk) == MAX_QUERIES or size + length > MAX_URL_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(query)
        size += length
    if chunk:
        yield chunk
