"""ReAct: think, search, observe, with every observation kept in the history (TAEC, appendix A.8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from visor.env.prompts import fill
from visor.models.base import PolicyClient, Sampling, Tool
from visor.retrieval.base import Retriever
from visor.systems.config import LoopConfig
from visor.systems.loop import CallLoop, Protocols
from visor.systems.pages import labelled, page_reference, with_visual_budget
from visor.systems.prompts import ReactPrompts
from visor.systems.replies import Call, TagCalls
from visor.systems.run import QuestionRun, TurnListener
from visor.systems.waiting import waits
from visor.types import (
    Action,
    Answer,
    Invalid,
    Message,
    Observation,
    ObservationKind,
    PageStore,
    Part,
    Question,
    Search,
    TextPart,
    Trajectory,
    Turn,
)


class ReactSystem:
    """Two tools, search and answer; pages seen before are shown again when another query finds them.

    A repeated query (equal up to case and white space) gets a notice instead of pages.
    """

    name = "react"

    def __init__(
        self,
        client: PolicyClient,
        retriever: Retriever,
        store: PageStore,
        config: LoopConfig,
        prompts: ReactPrompts,
        sampling: Sampling,
    ) -> None:
        self.client = client
        self.retriever = retriever
        self.store = store
        self.config = config
        self.prompts = prompts
        self.sampling = sampling
        self.protocols = Protocols(client, config.protocol, TagCalls(prompts.tags), config.tool_choice)
        self.tools = _tools(prompts)

    async def solve(
        self,
        question: Question,
        *,
        seed: int = 0,
        sample_index: int = 0,
        on_turn: TurnListener | None = None,
    ) -> Trajectory:
        """Answer one question. A fault ends it with an error record; it is never raised."""
        run = QuestionRun(self.name, question, self.client, self.sampling, seed, sample_index, on_turn)
        run.meta = {"settings": self.config.model_dump(mode="json"), "prompts": self.prompts.identity}
        play = _ReactQuestion(self, run)
        await CallLoop(run, self.protocols, play, waits(self.retriever)).play()
        return run.trajectory()


class _ReactQuestion:
    """One question as ReAct plays it: the history, and what each call does."""

    def __init__(self, system: ReactSystem, run: QuestionRun) -> None:
        self._system = system
        self._run = run
        self._prompts = system.prompts
        self._queries: set[str] = set()
        self._shown = 0
        self._history: list[Message] = []
        self.max_calls = system.config.max_calls
        self.system_text = system.prompts.system
        self.tools: Sequence[Tool] = system.tools
        self.answer_tool = "answer"
        self.forced_answer = self._filled(system.prompts.forced_answer)
        self.plain_question = self._filled(system.prompts.plain_question)

    def _filled(self, template: str, **values: str) -> str:
        return fill(template, question=self._run.question.text, **values)

    def messages(self, system: Message) -> list[Message]:
        """The prompt and everything since, with the pictures at their share of the budget."""
        question = Message(role="user", content=[TextPart(text=self._filled(self._prompts.question))])
        self._run.prompt = [system, question]
        budget = self._system.config.visual_budget
        return with_visual_budget([system, question, *self._history], budget)

    def action(self, call: Call, raw: str) -> Action:
        if call.problem:
            return Invalid(reason=call.problem, raw=raw)
        if call.name == "answer":
            if "response" not in call.arguments:
                return Invalid(reason="the answer is missing", raw=raw)
            return Answer(text=call.text("response"))
        if call.name != "search":
            return Invalid(reason=f"there is no tool {call.name!r}", raw=raw)
        query = call.text("query")
        return Search(query=query) if query else Invalid(reason="the search query is empty", raw=raw)

    def answered(self, call: Call, text: str) -> None:
        """Nothing rests on it."""

    def act(self, turn: Turn, call: Call) -> tuple[list[Part], dict[str, Any]]:
        """What the reply brought: parts of the next message, and fields of the observation."""
        if isinstance(turn.action, Search):
            return self._search(turn, turn.action.query)
        assert isinstance(turn.action, Invalid)
        notice = self._filled(self._prompts.invalid, reason=turn.action.reason)
        return [TextPart(text=notice)], {"kind": ObservationKind.INVALID}

    def _search(self, turn: Turn, query: str) -> tuple[list[Part], dict[str, Any]]:
        turn.query = query
        key = " ".join(query.split()).casefold()
        if key in self._queries:
            text = self._filled(self._prompts.repeated)
            return [TextPart(text=text)], {"kind": ObservationKind.NO_NEW_PAGE}
        config = self._system.config
        hits, turn.retrieval_seconds = self._run.search(
            self._system.retriever, query, config.pages_per_search
        )
        self._queries.add(key)
        turn.candidates = [(hit.page_id, float(hit.score)) for hit in hits]
        if not hits:
            text = self._filled(self._prompts.no_page)
            return [TextPart(text=text)], {"kind": ObservationKind.NO_NEW_PAGE}
        parts: list[Part] = []
        for hit in hits:
            self._shown += 1
            label = self._label(hit.page_id)
            parts += labelled(label, page_reference(hit.page_id, config))
        parts.append(TextPart(text=self._filled(self._prompts.pages_end)))
        return parts, {"kind": ObservationKind.PAGE, "page_ids": [hit.page_id for hit in hits]}

    def _label(self, page_id: str) -> str:
        caption = ""
        if self._system.config.captions:
            with self._run.environment():
                caption = self._system.store.page(page_id).caption
        return fill(self._prompts.page, number=str(self._shown), caption=caption).rstrip()

    def observed(self, reply: Message, observation: Observation) -> None:
        self._history += [reply, observation.message]


def _tools(prompts: ReactPrompts) -> list[Tool]:
    return [
        Tool("search", prompts.search_tool, text_arguments(query=prompts.query_argument)),
        Tool("answer", prompts.answer_tool, text_arguments(response=prompts.response_argument)),
    ]


def text_arguments(**described: str) -> dict[str, Any]:
    """The JSON schema of arguments that are all text and all needed."""
    properties = {name: {"type": "string", "description": text} for name, text in described.items()}
    return {"type": "object", "properties": properties, "required": list(properties)}
