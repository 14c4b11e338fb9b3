"""A policy client that replies from a script: tests and demonstrations run the real code path with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from visor.models.base import Request
from visor.text_files import read_text
from visor.types import Completion

Script = Sequence[str] | Mapping[str, Sequence[str]] | Callable[[Request], "str | Completion"]


class ScriptedClient:
    """Replies without a model, the same way every time.

    `script` is a list, given out in the order of the calls; a dictionary question → replies of one episode;
    or a function of the request. By question, each episode starts at the first reply: `Request.opens`, or a
    request without an assistant message, tells where; episodes that run at once are told apart by their
    asyncio task.
    ValueError when a script has no reply left, or none for the question.
    """

    def __init__(self, script: Script, name: str = "scripted"):
        self.name = name
        self._script = script
        self._position: dict[object, int] = {}

    @classmethod
    def from_file(cls, path: str | Path) -> ScriptedClient:
        """Read JSON lines: all `{"question": …, "replies": […]}`, or all `{"reply": …}` in order.

        ValueError naming file and line for anything else.
        """
        by_question: dict[str, list[str]] = {}
        in_order: list[str] = []
        # At line feeds only: str.splitlines would also cut at U+2028 inside a reply.
        for number, line in enumerate(read_text(path).split("\n"), 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                if "reply" in record:
                    in_order.append(str(record["reply"]))
                else:
                    by_question[record["question"]] = [str(reply) for reply in record["replies"]]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(
                    f'{path}, line {number}: expected {{"question": …, "replies": […]}} or {{"reply": …}}'
                ) from error
        if bool(by_question) == bool(in_order):
            raise ValueError(f"{path}: a script holds either questions with replies or replies in order")
        return cls(by_question or in_order, name=Path(path).stem)

    async def complete(self, request: Request) -> Completion:
        """The next reply of the script."""
        if callable(self._script):
            reply = self._script(request)
            return reply if isinstance(reply, Completion) else self._completion(reply)
        if isinstance(self._script, Mapping):
            return self._completion(self._by_question(request, self._script))
        return self._completion(self._next("order", self._script, "the script"))

    def _by_question(self, request: Request, script: Mapping[str, Sequence[str]]) -> str:
        shown = next((m.text for m in request.messages if m.role == "user"), "")
        question = max((q for q in script if q in shown), key=len, default=None)
        if question is None:
            raise ValueError(f"the script has no replies for the question in {shown!r}")
        key = (question, id(asyncio.current_task()))
        replied = any(message.role == "assistant" for message in request.messages)
        if not replied if request.opens is None else request.opens:
            self._position.pop(key, None)
        return self._next(key, script[question], f"the script of {question!r}")

    def _next(self, key: object, replies: Sequence[str], what: str) -> str:
        position = self._position.get(key, 0)
        if position >= len(replies):
            raise ValueError(f"{what} has {len(replies)} replies and was asked for one more")
        self._position[key] = position + 1
        return replies[position]

    def _completion(self, text: str) -> Completion:
        return Completion(text=text, model=self.name)
