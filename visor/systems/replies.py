"""What a reply asks for: one call of a tool, made natively or written in tags, or a plain answer.

Three ways to make calls, with one interface: native tool calls, the `<search>`/`<answer>` tags that VISOR
policies are trained on, and `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, the form that Qwen models
and their servers use. Only what the model wrote is read, and only the first call of a reply is carried out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from visor.env.actions import ParsedResponse, parse_response
from visor.models.base import Tool
from visor.types import (
    Answer,
    Completion,
    FinishReason,
    Invalid,
    Message,
    Part,
    Search,
    TextPart,
    ToolCall,
    ToolResult,
)

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
THOUGHT_END = "</think>"
TAGS = re.compile(r"</?(?:think|search|bbox|answer|tool_call)\b")

AS_TEXT = "call written as text"
MORE_THAN_ONE = "more than one call"
UNTAGGED = "answer without tags"
NOT_CARRIED_OUT = "Not carried out: only the first call of a reply is."


@dataclass(frozen=True)
class Call:
    """What one reply asks for."""

    name: str = ""
    """Of the tool; "" = there is no usable call, and `problem` says why."""
    arguments: dict[str, Any] = field(default_factory=dict)
    think: str = ""
    """The text around the call."""
    flags: tuple[str, ...] = ()
    """Departures from the protocol that were read all the same."""
    problem: str = ""

    def text(self, argument: str) -> str:
        """An argument as text, stripped; "" when it is missing."""
        value = self.arguments.get(argument)
        if value is None or isinstance(value, str):
            return (value or "").strip()
        return json.dumps(value, ensure_ascii=False)


class CallProtocol(Protocol):
    """One way to make calls."""

    name: str

    def offered(self, tools: Sequence[Tool]) -> Sequence[Tool]:
        """The tools that go with the request."""
        ...

    def instructions(self, tools: Sequence[Tool]) -> str:
        """What the system text has to say about calls; "" where the tools go with the request."""
        ...

    def read(self, completion: Completion) -> Call: ...

    def reply(self, completion: Completion) -> Message:
        """The reply as it stands in the history."""
        ...

    def result(self, completion: Completion, parts: Sequence[Part]) -> Message:
        """What its call brought, or a notice, as the next message."""
        ...


class NativeCalls:
    """Calls through the endpoint's own protocol. One written as text instead is read too, and flagged."""

    name = "native"

    def offered(self, tools: Sequence[Tool]) -> Sequence[Tool]:
        return tools

    def instructions(self, tools: Sequence[Tool]) -> str:
        return ""

    def read(self, completion: Completion) -> Call:
        if not completion.tool_calls:
            written = read_text_call(completion.text)
            if not written.name:
                return Call(think=completion.text.strip(), problem="it called no tool")
            return Call(written.name, written.arguments, written.think, (AS_TEXT, *written.flags))
        first = completion.tool_calls[0]
        think, flags = completion.text.strip(), (MORE_THAN_ONE,) if len(completion.tool_calls) > 1 else ()
        arguments = _object(first.arguments)
        if arguments is None:
            return Call(think=think, flags=flags, problem="the arguments of the call are not a JSON object")
        return Call(first.name, arguments, think, flags)

    def reply(self, completion: Completion) -> Message:
        text: list[Part] = [TextPart(text=completion.text)] if completion.text else []
        content = [*text, *completion.tool_calls] or [TextPart(text="")]
        return Message(role="assistant", content=content)

    def result(self, completion: Completion, parts: Sequence[Part]) -> Message:
        if not completion.tool_calls:
            return Message(role="user", content=list(parts))
        first, *others = completion.tool_calls
        content: list[Part] = [ToolResult(call_id=first.call_id), *parts]
        for call in others:
            content += [ToolResult(call_id=call.call_id), TextPart(text=NOT_CARRIED_OUT)]
        return Message(role="tool", content=content)


class _TextReplies:
    """What the two textual ways share: the reply stands as it was sampled, a result is a user message."""

    def offered(self, tools: Sequence[Tool]) -> Sequence[Tool]:
        return ()

    def reply(self, completion: Completion) -> Message:
        return reply_message(completion)

    def result(self, completion: Completion, parts: Sequence[Part]) -> Message:
        return Message(role="user", content=list(parts))


class JsonCalls(_TextReplies):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

    name = "text"

    def instructions(self, tools: Sequence[Tool]) -> str:
        listed = "\n".join(
            json.dumps(
                {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
                ensure_ascii=False,
            )
            for tool in tools
        )
        return (
            "You act by calling one of these tools, given as JSON with the schema of their arguments:\n"
            f"{listed}\n"
            "End every reply with exactly one call, written like this and with nothing after it:\n"
            f'{CALL_OPEN}{{"name": "the tool", "arguments": {{"argument": "value"}}}}{CALL_CLOSE}'
        )

    def read(self, completion: Completion) -> Call:
        return read_text_call(completion.text)


class TagCalls(_TextReplies):
    """`<search>query</search>` and `<answer>text</answer>`, for the tools `search` and `answer`."""

    name = "text"

    def __init__(self, instructions: str) -> None:
        self._instructions = instructions

    def instructions(self, tools: Sequence[Tool]) -> str:
        return self._instructions

    def read(self, completion: Completion) -> Call:
        parsed = parse_tags(completion.text)
        match parsed.action:
            case Search(query=query):
                return Call("search", {"query": query}, parsed.think, tuple(parsed.flags))
            case Answer(text=text):
                return Call("answer", {"response": text}, parsed.think, tuple(parsed.flags))
            case Invalid(reason=reason):
                return Call(think=parsed.think, flags=tuple(parsed.flags), problem=reason)
        return Call(think=parsed.think, flags=tuple(parsed.flags), problem="there is no such action here")


def reply_message(completion: Completion) -> Message:
    """A reply that stands in the history as text, with the ids as sampled where there are any."""
    content: list[Part] = [TextPart(text=completion.text)]
    return Message(role="assistant", content=content, token_ids=completion.token_ids)


def parse_tags(text: str) -> ParsedResponse:
    """Read a reply in tags. Reasoning outside of `<think>` is no defect here: endpoint models give none."""
    return parse_response(text if "think>" in text else f"<think></think>{text}")


def read_text_call(text: str) -> Call:
    """The first `<tool_call>` after the thinking. Its closing tag may be missing where the JSON ends."""
    thought, closed, after = text.rpartition(THOUGHT_END)
    if not closed and "<think>" in text:
        return Call(think=text.replace("<think>", "").strip(), problem="the reasoning was never closed")
    before, found, rest = after.partition(CALL_OPEN)
    think = "\n".join(part.strip() for part in (thought.replace("<think>", ""), before) if part.strip())
    if not found:
        return Call(think=think, problem="it called no tool")
    flags = (MORE_THAN_ONE,) if CALL_OPEN in rest else ()
    try:
        call, _ = json.JSONDecoder().raw_decode(rest.strip())
    except ValueError:
        return Call(think=think, flags=flags, problem="the text of the call is not JSON")
    name, arguments = (call.get("name"), call.get("arguments")) if isinstance(call, dict) else (None, None)
    if isinstance(arguments, str):
        arguments = _object(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return Call(
            think=think, flags=flags, problem='a call needs a "name" and "arguments" that are an object'
        )
    return Call(name, arguments, think, flags)


def _object(text: str) -> dict[str, Any] | None:
    """A JSON object; no text at all is an empty one. None for anything else."""
    try:
        value = json.loads(text) if text.strip() else {}
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def read_answer(completion: Completion) -> tuple[str, Answer | Invalid, list[str]]:
    """(thinking, answer, flags) of a reply to a question that takes nothing but an answer.

    The text in `<answer>`; a whole reply that uses no tag at all, when it was not cut off. Text of a reply
    that did begin with tags and never came to an answer is none.
    """
    parsed = parse_tags(completion.text)
    if isinstance(parsed.action, Answer):
        return parsed.think, parsed.action, parsed.flags
    text = completion.text.strip()
    if text and not TAGS.search(text) and completion.finish_reason == FinishReason.STOP:
        return "", Answer(text=text), [UNTAGGED]
    reason = parsed.action.reason if isinstance(parsed.action, Invalid) else "only an answer was possible"
    return parsed.think, Invalid(reason=reason, raw=completion.text), parsed.flags


def raw_text(completion: Completion) -> str:
    """A reply with its native calls, as text."""
    calls = [json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
             for call in completion.tool_calls]  # fmt: skip
    return "\n".join([*([completion.text] if completion.text else []), *calls])


def as_text(messages: Sequence[Message]) -> list[Message]:
    """The same conversation without native calls, for a request that offers no tools."""
    return [_plain(message) for message in messages]


def _plain(message: Message) -> Message:
    if message.role != "tool" and not any(isinstance(part, ToolCall) for part in message.content):
        return message
    content: list[Part] = []
    for part in message.content:
        if isinstance(part, ToolCall):
            content.append(TextPart(text=f"{CALL_OPEN}{_call_text(part)}{CALL_CLOSE}"))
        elif not isinstance(part, ToolResult):
            content.append(part)
    return Message(role="user" if message.role == "tool" else message.role, content=content)


def _call_text(call: ToolCall) -> str:
    arguments = _object(call.arguments)
    return json.dumps(
        {"name": call.name, "arguments": call.arguments if arguments is None else arguments},
        ensure_ascii=False,
    )
