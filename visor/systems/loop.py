"""The loop of react and dag: calls until an answer, then a forced answer, then a plain question.

"At most 20 model calls; then a call with a forced-answer instruction; if that still yields no call, a plain
question over the same context" (TAEC, appendix A.1), on endpoints with native tool calls and on any other
client.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from visor.models.base import PolicyClient, Tool, ToolsNotSupported, takes_tools
from visor.systems.replies import (
    Call,
    CallProtocol,
    NativeCalls,
    as_text,
    raw_text,
    read_answer,
)
from visor.systems.run import QuestionRun, RunOver
from visor.systems.waiting import in_thread
from visor.types import (
    Action,
    Answer,
    Completion,
    Invalid,
    Message,
    Observation,
    Part,
    TextPart,
    Turn,
    text_message,
)


class Protocols:
    """Which way of making calls a client is asked in; what an endpoint refuses once is not tried again."""

    def __init__(
        self,
        client: PolicyClient,
        setting: Literal["auto", "native", "text"],
        textual: CallProtocol,
        tool_choice: Literal["auto", "required"] = "auto",
    ) -> None:
        """ValueError for native calls of a client that makes none."""
        self.must_call = tool_choice == "required"
        native = takes_tools(client)
        if setting == "native" and not native:
            raise ValueError(
                f"protocol native: {client.name} makes no native tool calls; only an openai: model does. "
                "Set protocol to auto or text"
            )
        self.textual = textual
        self.reason = "as set" if setting == "text" else "the client takes no tools"
        self._fixed = setting == "native"
        self.current: CallProtocol = textual if setting == "text" or not native else NativeCalls()

    def refused(self, error: ToolsNotSupported) -> bool:
        """Ask in text from now on; False where native calls are set, and the refusal stands."""
        if self._fixed:
            return False
        self.current = self.textual
        self.reason = f"the endpoint refused tools: {error}"
        return True

    def record(self, used: CallProtocol) -> dict[str, str]:
        """For the trajectory: the way used, and for text why it is this one."""
        return {"name": used.name} | ({"reason": self.reason} if used is self.textual else {})


class QuestionPlay(Protocol):
    """What a system makes of the calls of one question."""

    max_calls: int
    system_text: str
    tools: Sequence[Tool]
    answer_tool: str
    """Name of the tool that answers."""
    forced_answer: str
    plain_question: str

    def messages(self, system: Message) -> list[Message]:
        """The context of the next call; `system` is the system message, with what the protocol adds."""
        ...

    def action(self, call: Call, raw: str) -> Action: ...

    def answered(self, call: Call, text: str) -> None:
        """Take note of the answer."""
        ...

    def act(self, turn: Turn, call: Call) -> tuple[list[Part], dict[str, Any]]:
        """Carry out a reply that is no answer. Returns the parts of the next message and the fields of the
        observation; no parts = the next context is made anew."""
        ...

    def observed(self, reply: Message, observation: Observation) -> None:
        """Take a reply and its observation into the history."""
        ...


class CallLoop:
    """Plays one question. Every call is a turn of the record."""

    def __init__(
        self, run: QuestionRun, protocols: Protocols, play: QuestionPlay, blocking: bool = False
    ) -> None:
        """`blocking`: carrying out a call may wait for a retriever across the network: in a thread."""
        self._run = run
        self._blocking = blocking
        self._protocols = protocols
        self._protocol = protocols.current
        self._play = play

    async def play(self) -> None:
        """Run until an answer, a fault, or the end of the calls; never raises for a fault."""
        try:
            await self._calls()
            if not self._run.done:
                await self._forced_answer()
        except RunOver:
            pass
        self._run.meta["protocol"] = self._protocols.record(self._protocol)

    async def _calls(self) -> None:
        while self._run.calls < self._play.max_calls and not self._run.done:
            context, completion = await self._ask(self._play.tools)
            if self._blocking:
                turn = await in_thread(self._take, context, completion)
            else:
                turn = self._take(context, completion)
            self._run.end(turn)

    async def _ask(self, tools: Sequence[Tool], more: str = "") -> tuple[list[Message], Completion]:
        """One call under the protocol; before the first turn, an endpoint's refusal of tools changes it."""
        while True:
            context = self._context(more)
            try:
                return context, await self._run.ask(
                    context, self._protocol.offered(tools), self._protocols.must_call
                )
            except ToolsNotSupported as error:
                if self._run.turns or not self._protocols.refused(error):
                    self._run.fail("policy", error)
                    raise RunOver from None
                self._protocol = self._protocols.current

    def _context(self, more: str = "") -> list[Message]:
        instructions = self._protocol.instructions(self._play.tools)
        parts = [part for part in (self._play.system_text, instructions) if part]
        with self._run.environment():
            context = self._play.messages(text_message("system", "\n\n".join(parts)))
        return [*context, text_message("user", more)] if more else context

    def _take(self, context: list[Message], completion: Completion, final: bool = False) -> Turn:
        call = self._protocol.read(completion)
        action = self._play.action(call, raw_text(completion))
        if final and not isinstance(action, Answer):
            action = Invalid(reason="only an answer was possible", raw=raw_text(completion))
        turn = self._run.begin(
            context=context,
            completion=completion,
            think=call.think,
            action=action,
            format_ok=not call.flags,
            flags=list(call.flags),
        )
        if isinstance(action, Answer):
            self._play.answered(call, action.text)
        elif not final:
            parts, fields = self._play.act(turn, call)
            if parts:
                message = self._protocol.result(completion, parts)
                turn.observation = Observation(message=message, **fields)
                self._play.observed(self._protocol.reply(completion), turn.observation)
        return turn

    async def _forced_answer(self) -> None:
        """The call after the last one, with the answer tool alone; then a plain question."""
        answer = [tool for tool in self._play.tools if tool.name == self._play.answer_tool]
        context, completion = await self._ask(answer, self._play.forced_answer)
        self._run.end(self._take(context, completion, final=True))
        if self._run.done:
            return
        question: list[Part] = [TextPart(text=self._play.plain_question)]
        context = as_text([*self._context(), Message(role="user", content=question)])
        completion = await self._run.ask(context)
        think, action, flags = read_answer(completion)
        self._run.end(
            self._run.begin(
                context=context,
                completion=completion,
                think=think,
                action=action,
                format_ok=not flags,
                flags=flags,
            )
        )
