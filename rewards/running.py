"""Calls under way: at most so many at once, and one for all who ask the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Running(Generic[T]):
    """The calls of one event loop, to which semaphores and tasks belong."""

    def __init__(self, max_concurrency: int) -> None:
        self.slots = asyncio.Semaphore(max_concurrency)
        self._tasks: dict[str, asyncio.Task[T]] = {}

    def __contains__(self, key: str) -> bool:
        """Whether a call for this key is under way."""
        return key in self._tasks

    async def shared(self, key: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the call under way for `key` brings, or else what `call` brings, which is then under way."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(call())
            task.add_done_callback(lambda _: self._tasks.pop(key, None))
        # Several may wait for it: one that is cancelled must not take it from the others.
        return await asyncio.shield(task)
