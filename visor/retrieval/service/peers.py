"""The peers' search protocol, so that agents written for their servers run on ours.

VRAG-RL, ViDoRAG and VISOR's public code ask `GET /search?queries=a&queries=b` and read a list for each
query; VRAG's later servers take `POST /search` and answer `{"results": [{"data": […]}]}`.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from visor.retrieval.base import Query, ScoredPage
from visor.retrieval.peer_names import PeerImages
from visor.retrieval.service.exchange import read_body, reply, until_gone
from visor.retrieval.service.limits import Refused
from visor.retrieval.service.messages import is_text, read_json
from visor.retrieval.service.scoring import Ranked, Scorer

GET_TOP_K = 10
"""Their servers give 10 pages to a GET, and 3 to a POST that names no number."""
POST_TOP_K = 3


def add_peer_endpoints(app: FastAPI, scorer: Scorer, images: PeerImages) -> None:
    """`GET /search` and `POST /search`. Each hit also has our page id and score, which their agents skip."""

    async def ranked(request: Request, texts: list[str], top_k: int) -> Ranked:
        limits = scorer.limits
        if len(texts) > limits.max_queries:
            raise Refused(413, f"the request has {len(texts)} queries, more than {limits.max_queries}.")
        if any(len(text) > limits.max_query_chars for text in texts):
            raise Refused(413, f"a query has more than {limits.max_query_chars} characters.")
        if not 0 <= top_k <= limits.max_top_k:
            raise Refused(422, f"top_k is {top_k}; it must be 0 to {limits.max_top_k}.")
        return await until_gone(request, scorer.search([Query(text, top_k) for text in texts]))

    def listed(hits: list[ScoredPage]) -> list[dict[str, Any]]:
        return [
            {
                "idx": position,
                "image_file": images.path(hit.page_id),
                "page_id": hit.page_id,
                "score": hit.score,
            }
            for position, hit in enumerate(hits)
        ]

    @app.get("/search")
    async def get_search(request: Request) -> Response:
        scorer.check_ready()
        texts = request.query_params.getlist("queries")
        if not texts:
            raise Refused(422, "name the queries: /search?queries=…&queries=….")
        number = request.query_params.get("top_k", str(GET_TOP_K))
        if not (number.isascii() and number.isdigit() and len(number) < 10):
            raise Refused(422, "top_k is not a number.")
        await read_body(request, scorer.limits)
        found = await ranked(request, texts, int(number))
        return reply([listed(hits) for hits in found])

    @app.post("/search")
    async def post_search(request: Request) -> Response:
        scorer.check_ready()
        body = read_json(await read_body(request, scorer.limits))
        if not isinstance(body, dict):
            raise Refused(422, "the body must be an object with queries.")
        texts, top_k = body.get("queries"), body.get("top_k", POST_TOP_K)
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, list) or not all(isinstance(t, str) and is_text(t) for t in texts):
            raise Refused(422, "queries must be a list of texts.")
        if not isinstance(top_k, int) or isinstance(top_k, bool):
            raise Refused(422, "top_k is not a number.")
        if body.get("search_corpus") is not None:
            raise Refused(422, "this service has one corpus; leave search_corpus out.")
        found = await ranked(request, texts, top_k)
        if body.get("vrag_ret") is True:
            return reply([listed(hits) for hits in found])
        results = [
            {
                "score": [hit.score for hit in hits],
                "data": [
                    {"type": "image", "file_path": images.path(hit.page_id), "page_id": hit.page_id}
                    for hit in hits
                ],
            }
            for hits in found
        ]
        return reply({"results": results})
