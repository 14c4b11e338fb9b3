"""A retriever that is somewhere else: the interface of a local one, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx2

from visor.retrieval.base import Query, ScoredPage
from visor.retrieval.http_session import HttpSession, RetrievalError
from visor.retrieval.index import corpus_hash
from visor.retrieval.peer_client import PeerProtocol
from visor.types import Page

__all__ = ["RetrievalClient", "RetrievalError"]

PEER_PREFIX = "peer+"
CONNECT_BUDGET = 10.0
"""Seconds."""


class WireProtocol(Protocol):
    """How a kind of server is spoken to."""

    name: str
    fingerprint: str | None

    def search(self, queries: Sequence[Query]) -> list[list[ScoredPage]]: ...


class RetrievalClient:
    """Searches the service at a URL, as `visor serve` prints it, or (`peer+http://…`) a peer's server.

    For any number of threads. Made, it has asked the service what it is; each search then says which one is
    expected, so that an index that changes meanwhile is an error and not other pages. An error is a
    RetrievalError, after as many tries as fit the budget; see `HttpSession` for what is tried again.
    """

    blocking = True
    """A search waits for the network: an event loop runs it in a thread."""

    def __init__(
        self,
        url: str,
        *,
        pages: Sequence[Page] | None = None,
        expect_fingerprint: str | None = None,
        timeout: float = 30.0,
        budget: float = 60.0,
        connect_budget: float | None = None,
        max_connections: int = 64,
    ):
        """Connect.

        `pages`: the local corpus, which must be the service's; a peer's server needs it.
        `expect_fingerprint`: what the service must have (`BEHAVIOUR-IDENTITY` or the behaviour alone); None
        takes what is there now. `timeout`: seconds of one try. `budget`: seconds of a search with all its
        tries and waits; `connect_budget`: of this first exchange (None: 10). Raises RetrievalError, and
        ValueError for a URL that is none and for another corpus or fingerprint.
        """
        self.url = url
        address = url.removeprefix(PEER_PREFIX)
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a search service; expected http://HOST:PORT")
        self._page_ids = None if pages is None else frozenset(page.page_id for page in pages)
        self._session = HttpSession(address, timeout, budget, max_connections)
        first = CONNECT_BUDGET if connect_budget is None else connect_budget
        try:
            if url.startswith(PEER_PREFIX):
                if pages is None:
                    raise ValueError(f"{url}: a peer's server names images; knowing them takes the corpus")
                self._protocol: WireProtocol = PeerProtocol(self._session, pages, first)
            else:
                service = ServiceProtocol(self._session, first)
                service.check_corpus(pages)
                self._protocol = service
            self._check_fingerprint(expect_fingerprint)
        except BaseException:
            self._session.close()
            raise
        self.name = self._protocol.name

    @property
    def fingerprint(self) -> str | None:
        """Of the service, as it was at connecting; None when it gives none."""
        return self._protocol.fingerprint

    def search(self, query: str, k: int) -> list[ScoredPage]:
        """The best `k` pages or fewer. Raises RetrievalError; ValueError for a negative k."""
        return self.search_batch([Query(query, k)])[0]

    def search_batch(self, queries: Sequence[Query]) -> list[list[ScoredPage]]:
        """The pages of each query, in the order of the queries; see `search`."""
        found = iter(self._protocol.search([query for query in queries if _has_answer(query)]))
        ranked = [next(found) if _has_answer(query) else [] for query in queries]
        self._check_pages(ranked)
        return ranked

    def close(self) -> None:
        """Close the connections; searches under way end with RetrievalError."""
        self._session.close()

    def __enter__(self) -> RetrievalClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_pages(self, ranked: list[list[ScoredPage]]) -> None:
        if self._page_ids is None:
            return
        for hit in (hit for hits in ranked for hit in hits):
            if hit.page_id not in self._page_ids:
                raise RetrievalError(
                    f"the search service {self.url} returned the page {hit.page_id!r}, which the local "
                    "corpus does not hold: it serves another corpus"
                )

    def _check_fingerprint(self, expected: str | None) -> None:
        actual = self._protocol.fingerprint
        if expected is not None and (actual is None or expected not in (actual, actual.partition("-")[0])):
            raise ValueError(
                f"the search service {self.url} has the fingerprint {actual}, expected {expected}: "
                "the index or the corpus is another one"
            )


class ServiceProtocol:
    """Speaks to `visor serve`."""

    def __init__(self, session: HttpSession, budget: float):
        self._session = session
        try:
            version = _json(session, session.request("GET", "/v1/version", budget))
            self.name: str = str(version["retriever"]["name"])
            self.fingerprint: str | None = str(version["fingerprint"])
            self._max_queries = int(version["limits"]["max_queries"])
            self._corpus_hash = version["corpus_hash"]
            self._described = f"{version['corpus']!r} with {version['page_count']} pages"
        except (KeyError, TypeError, ValueError) as error:
            raise RetrievalError(f"{session.url} answers, but not as `visor serve` does: {error!r}") from None
        except RetrievalError as error:
            if error.status == 404:
                raise RetrievalError(
                    f"{session.url} answers, but is no `visor serve`; a peer's server is named "
                    f"{PEER_PREFIX}{session.url}",
                    404,
                ) from None
            raise

    def check_corpus(self, pages: Sequence[Page] | None) -> None:
        """ValueError when the service's corpus is not the one with these pages."""
        if pages is not None and self._corpus_hash is not None and self._corpus_hash != corpus_hash(pages):
            raise ValueError(
                f"the search service {self._session.url} serves the corpus {self._described}, which is not "
                f"the local one as it is now ({len(pages)} pages); build its index again and start it again"
            )

    def search(self, queries: Sequence[Query]) -> list[list[ScoredPage]]:
        ranked = []
        for start in range(0, len(queries), self._max_queries):
            ranked += self._ask(queries[start : start + self._max_queries])
        return ranked

    def _ask(self, queries: Sequence[Query]) -> list[list[ScoredPage]]:
        body = {
            "queries": [_asked(str(number), query) for number, query in enumerate(queries)],
            "expect_fingerprint": self.fingerprint,
        }
        try:
            response = self._session.request("POST", "/v1/search", json=body)
        except RetrievalError as error:
            if error.status == 409:
                raise RetrievalError(
                    f"the index behind {self._session.url} has changed since the connection: {error}", 409
                ) from None
            raise
        reply = _json(self._session, response)
        try:
            hits = {result["id"]: list(_hits(result["hits"])) for result in reply["results"]}
            return [hits[str(number)] for number in range(len(queries))]
        except (KeyError, TypeError, ValueError) as error:
            raise RetrievalError(f"{self._session.url} sent a reply that cannot be read: {error!r}") from None


def _asked(number: str, query: Query) -> dict[str, Any]:
    asked: dict[str, Any] = {"id": number, "text": query.text, "top_k": query.k}
    if query.exclude_page_ids:
        asked["exclude_page_ids"] = sorted(query.exclude_page_ids)
    if query.doc_ids is not None:
        asked["filter"] = {"doc_ids": sorted(query.doc_ids)}
    return asked


def _hits(hits: list[dict[str, Any]]) -> Iterator[ScoredPage]:
    for hit in hits:
        yield ScoredPage(str(hit["page_id"]), float(hit["score"]))


def _has_answer(query: Query) -> bool:
    """Queries without text have no pages, here as in any retriever; they need no server."""
    return bool(query.text.strip()) and query.k > 0


def _json(session: HttpSession, response: httpx2.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        raise RetrievalError(f"{session.url} sent a reply that is not JSON") from None
