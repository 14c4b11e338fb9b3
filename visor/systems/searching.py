"""Searches of episodes that wait at the same time are asked together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from visor.models.batching import settle
from visor.retrieval.base import Query, Retriever, ScoredPage
from visor.stage_clock import CLOCK
from visor.systems.waiting import in_thread, waits

T = TypeVar("T")


class SearchBatcher:
    """Hands searches that wait together to the retriever's `search_batch`, up to `batch_size` at once.

    A batch starts once the event loop has gone through a few rounds without a new search; it waits for no
    episode that is still busy, nor for an earlier batch. Equal searches of a batch are asked once. An index
    in memory is asked inside the event loop, one that says it is `blocking` (across the network) in a thread.
    A retriever without `search_batch` is asked by each caller for itself.
    """

    def __init__(self, retriever: Retriever, batch_size: int = 64) -> None:
        self.retriever = retriever
        self.batch_size = batch_size
        self._search_batch = getattr(retriever, "search_batch", None)
        self._waiting: list[tuple[Query, asyncio.Future]] = []
        self._collecting: asyncio.Task | None = None
        self._batches: set[asyncio.Task] = set()

    async def search(self, query: str, k: int) -> list[ScoredPage]:
        """The pages that the retriever's own `search` gives; raises what it raises for this query."""
        if self._search_batch is None:
            return await self._call(self.retriever.search, query, k)
        asked = Query(query, k)
        loop = asyncio.get_running_loop()
        task = self._collecting
        if task is None or task.done() or task.get_loop() is not loop:
            self._waiting = []  # whatever an earlier event loop left behind has nobody to wait for it
            self._collecting = loop.create_task(self._collect())
        future = loop.create_future()
        self._waiting.append((asked, future))
        return await future

    async def _collect(self) -> None:
        await settle(lambda: len(self._waiting))
        waiting, self._waiting = self._waiting, []
        for start in range(0, len(waiting), self.batch_size):
            batch = asyncio.create_task(self._serve(waiting[start : start + self.batch_size]))
            self._batches.add(batch)
            batch.add_done_callback(self._batches.discard)

    async def _serve(self, batch: Sequence[tuple[Query, asyncio.Future]]) -> None:
        queries = list(dict.fromkeys(query for query, future in batch if not future.done()))
        outcomes = dict(zip(queries, await self._ask(queries), strict=True))
        for query, future in batch:
            if future.done():
                continue  # cancelled meanwhile
            outcome = outcomes[query]
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(list(outcome))

    async def _ask(self, queries: Sequence[Query]) -> Sequence[list[ScoredPage] | Exception]:
        if self._search_batch is not None and len(queries) > 1:
            try:
                return await self._call(self._search_batch, queries)
            except Exception as error:
                if _is_away(error):
                    return [error] * len(queries)
        # Alone, or one query of the batch is at fault: the others must not fail for it.
        return await asyncio.gather(*map(self._ask_alone, queries))

    async def _ask_alone(self, query: Query) -> list[ScoredPage] | Exception:
        try:
            return await self._call(self.retriever.search, query.text, query.k)
        except Exception as error:
            return error

    async def _call(self, function: Callable[..., T], *arguments: object) -> T:
        asked = arguments[0]
        note = f"search {asked!r}" if isinstance(asked, str) else "several searches at once"
        if waits(self.retriever):
            with CLOCK.waiting("retrieve", note):
                return await in_thread(function, *arguments)
        with CLOCK.running("retrieve", note):
            return function(*arguments)


def _is_away(error: Exception) -> bool:
    """Whether a service cannot be reached at all, so that asking once more for each query helps nobody; one
    that refused gives the status of its refusal."""
    return isinstance(error, ConnectionError | TimeoutError) and getattr(error, "status", None) is None
