"""Requests that wait at the same time are served together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from visor.models.base import Request
from visor.types import Completion

Serve = Callable[[list[Request]], "list[Completion | Exception]"]
"""Answers a batch, in order; a request that cannot be served gets its exception in its place."""
SETTLING_ROUNDS = 3


async def settle(count: Callable[[], int]) -> None:
    """Return once the event loop has gone through `SETTLING_ROUNDS` rounds without a change of `count()`."""
    quiet, seen = 0, count()
    while quiet < SETTLING_ROUNDS:
        await asyncio.sleep(0)
        now = count()
        quiet, seen = (quiet + 1 if now == seen else 0), now


class Batcher:
    """Collects concurrent requests and hands up to `batch_size` of them to `serve`, in one worker thread.

    A batch starts once the event loop has gone through `SETTLING_ROUNDS` rounds without a new request. What
    `serve` raises is the fault of every request of that batch.
    """

    def __init__(self, serve: Serve, batch_size: int):
        self._serve = serve
        self._batch_size = batch_size
        self._waiting: list[tuple[Request, asyncio.Future]] = []
        self._task: asyncio.Task | None = None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="policy")

    async def submit(self, request: Request) -> Completion:
        """Wait for the reply to one request; raises what `serve` gave or raised for it."""
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._waiting = []  # whatever an earlier event loop left behind has nobody to wait for it
            self._task = loop.create_task(self._drain())
        future = loop.create_future()
        self._waiting.append((request, future))
        return await future

    async def _drain(self) -> None:
        while True:
            await settle(lambda: len(self._waiting))
            if not self._waiting:
                return
            batch, self._waiting = self._waiting[: self._batch_size], self._waiting[self._batch_size :]
            await self._run([(request, future) for request, future in batch if not future.done()])

    async def _run(self, batch: list[tuple[Request, asyncio.Future]]) -> None:
        if not batch:
            return
        requests = [request for request, _ in batch]
        try:
            results = await asyncio.get_running_loop().run_in_executor(self._executor, self._serve, requests)
        except Exception as error:
            results = [error] * len(batch)
        for (_, future), result in zip(batch, results, strict=True):
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
