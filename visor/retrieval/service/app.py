"""The HTTP endpoints over a scorer. docs/service.md describes them for users."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from visor.retrieval.peer_names import PeerImages
from visor.retrieval.service.exchange import ClientGone, read_body, reply, until_gone
from visor.retrieval.service.limits import Refused
from visor.retrieval.service.messages import SearchRequest, read_search, to_query
from visor.retrieval.service.pages import add_page_endpoints
from visor.retrieval.service.peers import add_peer_endpoints
from visor.retrieval.service.scoring import Scorer
from visor.types import PageStore

ENCODER_FIELDS = {
    "model": "name",
    "revision": "revision",
    "weights_hash": "weights_hash",
    "processor_hash": "processor_hash",
    "dtype": "dtype",
    "max_visual_tokens": "max_visual_tokens",
}
"""Field of /v1/version's retriever → field of the encoder in the index's manifest."""


def create_app(
    scorer: Scorer, corpus: PageStore, with_pages: bool = False, peer_images: PeerImages | None = None
) -> FastAPI:
    """The service over a scorer that has been started or will be; `lifespan` stops it.

    `with_pages` serves page texts and images of `corpus`; `peer_images` answers the peers' `/search`.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        scorer.stop()

    # The interactive documentation would load scripts from elsewhere; /openapi.json stays.
    # An address with a slash too many is refused in words; a redirection would have an empty body.
    app = FastAPI(
        title="visor retrieval", docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan
    )
    doc_ids = frozenset(page.doc_id for page in corpus.pages())

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        headers = {"Retry-After": str(error.retry_after)} if error.retry_after is not None else None
        return reply({"detail": error.sentence}, error.status, headers)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return reply({"detail": f"the service failed at this request: {type(error).__name__}."}, 500)

    @app.exception_handler(ClientGone)
    async def gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.get("/healthz")
    async def healthz() -> Response:
        return reply({"status": "ok"})

    @app.get("/readyz")
    async def readyz() -> Response:
        scorer.check_ready()
        if scorer.broken:
            raise Refused(503, f"the retriever failed at the latest search: {scorer.broken}.", retry_after=1)
        return reply({"status": "ready"})

    @app.get("/v1/version")
    async def version() -> Response:
        scorer.check_ready()
        return reply(describe(scorer))

    @app.post("/v1/search", openapi_extra=_json_body(SearchRequest))
    async def search(request: Request) -> Response:
        scorer.check_ready()
        asked = read_search(await read_body(request, scorer.limits), scorer.limits)
        fingerprint = scorer.fingerprint
        assert fingerprint is not None
        if asked.expect_fingerprint is not None and not fingerprint.matches(asked.expect_fingerprint):
            raise Refused(
                409,
                f"this service has the fingerprint {fingerprint}, not {asked.expect_fingerprint!r}: it "
                "serves another index, or the index was built again from something else.",
            )
        pairs = [to_query(query, doc_ids) for query in asked.queries]
        ranked = await until_gone(request, scorer.search([query for query, _ in pairs]))
        results = []
        for query, (_, unknown), hits in zip(asked.queries, pairs, ranked):
            result: dict[str, Any] = {
                "id": query.id,
                "hits": [{"page_id": hit.page_id, "score": hit.score} for hit in hits],
                "exhausted": len(hits) < query.top_k,
            }
            if unknown:
                result["unknown_doc_ids"] = unknown
            results.append(result)
        return reply({"generation": _generation(scorer), "fingerprint": str(fingerprint), "results": results})

    add_page_endpoints(app, corpus, with_pages)
    if peer_images is not None:
        add_peer_endpoints(app, scorer, peer_images)
    return app


def describe(scorer: Scorer) -> dict[str, Any]:
    """`GET /v1/version`."""
    assert scorer.opened is not None
    assert scorer.fingerprint is not None
    manifest = scorer.opened.manifest
    return {
        "index_id": scorer.fingerprint.identity,
        "generation": _generation(scorer),
        "page_count": manifest.get("page_count"),
        "corpus": manifest.get("corpus"),
        "corpus_hash": manifest.get("corpus_hash"),
        "retriever": _retriever(manifest, scorer.opened.retriever.name),
        "scorer": manifest.get("settings", {}),
        "libraries": manifest.get("libraries", {}),
        "fingerprint": str(scorer.fingerprint),
        "limits": {"max_queries": scorer.limits.max_queries, "max_top_k": scorer.limits.max_top_k},
    }


def _retriever(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    encoder = manifest.get("identity") or {}
    described = {"name": name, **{field: encoder.get(source) for field, source in ENCODER_FIELDS.items()}}
    if "parts" in manifest:
        described["parts"] = [_retriever(part, part["retriever"]) for part in manifest["parts"]]
    return described


def _generation(scorer: Scorer) -> str:
    """What the manifest calls the files that are served; it changes with every build."""
    assert scorer.opened is not None
    parts = scorer.opened.manifest.get("parts", [scorer.opened.manifest])
    return "+".join(str(part.get("generation", part.get("files"))) for part in parts)


def _json_body(model: Any) -> dict[str, Any]:
    """The body for /openapi.json; the body itself is read by hand, for its limits and its sentences."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema = _inline(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inline(value: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        if "$ref" in value:
            return _inline(definitions[value["$ref"].rpartition("/")[2]], definitions)
        return {key: _inline(item, definitions) for key, item in value.items()}
    return [_inline(item, definitions) for item in value] if isinstance(value, list) else value
