"""Messages, tools and calls in the form of the OpenAI chat protocol."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from visor.models.base import Tool
from visor.types import ImagePart, ImageRef, Message, Part, TextPart, ToolCall, ToolResult

PICTURES_FOLLOW = "The pictures follow in the next message."
"""Result of a native call that brings pictures: the protocol's tool messages take text only."""


class Pictures:
    """The pictures of one request: encodes each and counts what is sent."""

    def __init__(self, encode: Callable[[ImageRef], tuple[str, tuple[int, int]]]):
        """`encode`: reference → (base64 JPEG, (width, height) as sent)."""
        self._encode = encode
        self.sizes: list[tuple[int, int]] = []
        """(width, height) of each picture sent, in order."""
        self.bytes = 0
        """Base64 bytes of all pictures sent."""

    def part(self, ref: ImageRef) -> dict[str, Any]:
        """The content part of a picture, as a data URL."""
        data, size = self._encode(ref)
        self.sizes.append(size)
        self.bytes += len(data)
        return {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}}


def sent_messages(message: Message, pictures: Pictures) -> list[dict[str, Any]]:
    """One message in the endpoint's form. The results of native calls are a message each, followed by one of
    the user with their pictures, since tool messages take text only."""
    if message.role == "tool":
        return _results(message, pictures)
    calls = [part for part in message.content if isinstance(part, ToolCall)]
    if calls:
        sent = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": _json(call)},
            }
            for call in calls
        ]
        return [{"role": message.role, "content": message.text or None, "tool_calls": sent}]
    return [{"role": message.role, "content": _content(message.content, pictures)}]


def _content(parts: list[Part], pictures: Pictures) -> str | list[dict[str, Any]]:
    """Plain text, or a list of parts where there is a picture."""
    if not any(isinstance(part, ImagePart) for part in parts):
        return "".join(part.text for part in parts if isinstance(part, TextPart))
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, ImagePart):
            content.append(pictures.part(part.image))
        elif isinstance(part, TextPart):
            content.append({"type": "text", "text": part.text})
    return content


def _results(message: Message, pictures: Pictures) -> list[dict[str, Any]]:
    results: list[tuple[str, list[Part]]] = []
    for part in message.content:
        if isinstance(part, ToolResult):
            results.append((part.call_id, []))
        else:
            results[-1][1].append(part)
    sent: list[dict[str, Any]] = []
    shown: list[dict[str, Any]] = []
    for call_id, parts in results:
        content = _content(parts, pictures)
        if not isinstance(content, str):
            shown.append({"role": "user", "content": content})
            content = PICTURES_FOLLOW
        sent.append({"role": "tool", "tool_call_id": call_id, "content": content})
    return sent + shown


def _json(call: ToolCall) -> str:
    """The arguments as sent back: endpoints that parse them refuse a request whose JSON is broken."""
    try:
        json.loads(call.arguments)
    except ValueError:
        return "{}"
    return call.arguments


def sent_tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def read_calls(calls: list[Any]) -> list[ToolCall]:
    """Function calls of a reply. Ids that an endpoint leaves out are given; arguments that come parsed are
    written as JSON again."""
    found = []
    for number, call in enumerate(calls):
        function = getattr(call, "function", None)
        if function is None:
            continue
        arguments = function.arguments
        if not isinstance(arguments, str):
            arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
        found.append(
            ToolCall(
                call_id=call.id or f"call_{number}",
                name=encodable(function.name or ""),
                arguments=encodable(arguments),
            )
        )
    return found


def encodable(text: str) -> str:
    """Lone surrogates, which JSON can carry and UTF-8 cannot, become "?": replies are stored and sent."""
    return text.encode("utf-8", "replace").decode("utf-8")
