"""Reading requests and writing replies, with clients that are slow, greedy or gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response

from visor.retrieval.service.limits import Limits, Refused

T = TypeVar("T")
DISCARDED = 16


class ClientGone(Exception):
    """Whoever asked has closed the connection."""


async def read_body(request: Request, limits: Limits) -> bytes:
    """The whole body. Raises Refused when it is too large (413) or too slow (408), ClientGone.

    Of a body that is too large the rest is read and thrown away, up to DISCARDED times the limit: a client
    that is still sending when the connection closes would never see the refusal.
    """
    body = bytearray()
    size = 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                size += len(part)
                if size <= limits.max_body_bytes:
                    body += part
                if not message.get("more_body", False) or size > DISCARDED * limits.max_body_bytes:
                    break
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {limits.body_seconds:g} s.") from None
    if size > limits.max_body_bytes:
        raise Refused(413, f"the body has more than {limits.max_body_bytes} bytes; send several requests.")
    return bytes(body)


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, or cancel it and raise ClientGone when the connection is closed first.

    The request's body must have been read.
    """
    working = asyncio.ensure_future(work)
    closing = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({working, closing}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        closing.cancel()


def reply(
    value: Mapping[str, Any] | list, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """JSON, in ASCII, so that an id with anything in it can be sent."""
    content = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    return Response(content, status, headers=headers, media_type="application/json")
