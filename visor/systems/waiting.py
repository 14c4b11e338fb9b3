"""Waiting for a function that blocks, without holding up the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def waits(retriever: object) -> bool:
    """Whether a search waits for something outside this process, as the client of a service does."""
    return bool(getattr(retriever, "blocking", False))


async def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Run a blocking function in a thread of its own and await its result or exception.

    `asyncio.to_thread` has a handful of threads for everything in the process, so that sixty episodes would
    queue for them, and the interpreter waits for them at its end. Here each call has a daemon thread: an
    interrupted run ends at once, whatever its searches still wait for.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return  # cancelled meanwhile
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = function(*arguments)
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop has ended; nobody waits
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="waiting", daemon=True).start()
    return await future
