"""The DAG agent: searches as a graph, a prompt made anew after each summary (TAEC, appendix A.1).

The substrate that TAEC stands over; `visor.env.graph.GraphPolicy` is the seam, the plain agent one of its
policies.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from visor.env.graph import ActionGraph, GraphPolicy, Hint
from visor.env.prompts import fill
from visor.models.base import PolicyClient, Sampling, Tool
from visor.retrieval.base import Retriever
from visor.systems.config import LoopConfig
from visor.systems.dag_calls import ADD_ANSWER, dag_tools, memorised, parent_ids, read_action, settled
from visor.systems.loop import CallLoop, Protocols
from visor.systems.pages import labelled, page_reference
from visor.systems.prompts import DagPrompts
from visor.systems.replies import Call, JsonCalls
from visor.systems.run import QuestionRun, TurnListener
from visor.systems.waiting import waits
from visor.types import (
    Action,
    Message,
    Observation,
    ObservationKind,
    Part,
    Question,
    Search,
    Summary,
    TextPart,
    Trajectory,
    Turn,
)

GraphPolicyFactory = Callable[[Question], "GraphPolicy | Awaitable[GraphPolicy]"]
"""Makes the policy of one question; may be a coroutine function, for a layer that asks a model first."""


class DagSystem:
    """Three tools: add a search, summarise it, add the answer."""

    name = "dag"

    def __init__(
        self,
        client: PolicyClient,
        retriever: Retriever,
        config: LoopConfig,
        prompts: DagPrompts,
        sampling: Sampling,
        policies: GraphPolicyFactory,
    ) -> None:
        self.client = client
        self.retriever = retriever
        self.config = config
        self.prompts = prompts
        self.sampling = sampling
        self.policies = policies
        self.protocols = Protocols(client, config.protocol, JsonCalls(), config.tool_choice)

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
        try:
            made = self.policies(question)
            policy = await made if inspect.isawaitable(made) else made
        except Exception as error:
            run.fail("policy", error)
            return run.trajectory()
        play = _DagQuestion(self, run, policy)
        await CallLoop(run, self.protocols, play, waits(self.retriever)).play()
        run.meta |= {
            "evidence_policy": {"name": policy.name, **policy.describe()},
            "graph": play.graph.record(),
        }
        return run.trajectory()


class _DagQuestion:
    """One question as the DAG agent plays it."""

    def __init__(self, system: DagSystem, run: QuestionRun, policy: GraphPolicy) -> None:
        self._system = system
        self._config = system.config
        self._prompts = system.prompts
        self._run = run
        self._policy = policy
        self.graph = ActionGraph(run.question.text)
        self._labels: list[str] = []
        """Page of each numbered picture of the current prompt and what followed it."""
        self._prompt: Message | None = None
        self._history: list[Message] = []
        self.max_calls = system.config.max_calls
        self.system_text = system.prompts.system
        self.tools: Sequence[Tool] = dag_tools(system.prompts, policy.reported_slots)
        self.answer_tool = ADD_ANSWER
        question = run.question.text
        self.forced_answer = fill(system.prompts.forced_answer, question=question)
        self.plain_question = fill(system.prompts.plain_question, question=question)

    # ------------------------------------------------------------ the prompt

    def messages(self, system: Message) -> list[Message]:
        """The prompt as made after the last summary, and what has followed it."""
        if self._prompt is None:
            self._prompt = self._make_prompt()
        self._run.prompt = [system]
        return [system, self._prompt, *self._history]

    def _make_prompt(self) -> Message:
        """Question, hints and graph, then the pictures that are shown again."""
        self._labels = []
        text = prompt_text(self._prompts, self._run.question.text, self._policy, self.graph)
        content: list[Part] = [TextPart(text=text)]
        retained = self._policy.retained(self.graph, f"{self.system_text}\n{text}")
        if retained:
            content.append(TextPart(text="\n\n" + self._prompts.memory))
        for entry, pixels in retained:
            content += self._picture(entry.page_id, pixels)
        return Message(role="user", content=content)

    def _picture(self, page_id: str, pixels: int | None = None) -> list[Part]:
        """A page under the next number."""
        self._labels.append(page_id)
        label = fill(self._prompts.picture, number=str(len(self._labels)))
        return labelled(label, page_reference(page_id, self._config, pixels))

    # ------------------------------------------------------------ what a call does

    def action(self, call: Call, raw: str) -> Action:
        return read_action(call, raw, self.graph, self._labels)

    def answered(self, call: Call, text: str) -> None:
        parents, _ = self.graph.resolve(parent_ids(call))
        self.graph.answer = {"parents": [self.graph.nodes[p].node_id for p in parents], "answer": text}

    def act(self, turn: Turn, call: Call) -> tuple[list[Part], dict[str, Any]]:
        if isinstance(turn.action, Search):
            return self._search(turn, turn.action, call)
        if isinstance(turn.action, Summary):
            return self._summarise(turn, turn.action, call)
        reason = getattr(turn.action, "reason", "")
        text = fill(self._prompts.invalid, reason=reason)
        return [TextPart(text=text)], {"kind": ObservationKind.INVALID}

    def _search(self, turn: Turn, action: Search, call: Call) -> tuple[list[Part], dict[str, Any]]:
        turn.query = action.query
        k = self._config.pages_per_search
        hits, turn.retrieval_seconds = self._run.search(
            self._system.retriever, action.query, self._policy.pool_size(k)
        )
        turn.candidates = [(hit.page_id, float(hit.score)) for hit in hits]
        with self._run.environment():
            admitted = self._policy.admit(action.query, hits, k, self.graph)
        assert len(admitted) <= k, f"{self._policy.name} admitted {len(admitted)} pages of {k}"
        pages = [page_id for page_id in admitted if page_id not in self.graph.seen]
        node, flags = self.graph.add_search(call.text("id"), parent_ids(call), action.query)
        node.pages = pages
        _flag(turn, flags)
        if not pages:
            text = fill(self._prompts.nothing_new, node=node.node_id)
            return [TextPart(text=text)], {"kind": ObservationKind.NO_NEW_PAGE}
        parts: list[Part] = [TextPart(text=fill(self._prompts.found, node=node.node_id))]
        for page_id in pages:
            parts += self._picture(page_id)
        parts.append(TextPart(text=self._prompts.summarise))
        return parts, {"kind": ObservationKind.PAGE, "page_ids": pages}

    def _summarise(self, turn: Turn, action: Summary, call: Call) -> tuple[list[Part], dict[str, Any]]:
        """Nothing follows: the next prompt shows what was written."""
        pending = self.graph.pending
        assert pending is not None
        pending.summary = action.text
        for item in action.memorised:
            self.graph.keep(item.page_id, item.priority)
        self._policy.report(settled(call))
        _flag(turn, memorised(call, self._labels)[1])
        self._prompt, self._history = None, []
        return [], {}

    def observed(self, reply: Message, observation: Observation) -> None:
        self._history += [reply, observation.message]


def prompt_text(prompts: DagPrompts, question: str, policy: GraphPolicy, graph: ActionGraph) -> str:
    """The prompt without its pictures: question, hints, and the graph as `policy` shows it."""
    parts = [fill(prompts.question, question=question)]
    hints = policy.hints(graph)
    if hints:
        parts.append("\n".join([prompts.hints, *(_hint(prompts, hint) for hint in hints)]))
    nodes = [json.dumps(node, ensure_ascii=False) for node in policy.render(graph)]
    parts.append(fill(prompts.graph, graph="[" + ",\n ".join(nodes) + "]"))
    return "\n\n".join(parts)


def _hint(prompts: DagPrompts, hint: Hint) -> str:
    if hint.kind == "early_stop":
        return prompts.early_stop
    return fill(prompts.dead_end, query=hint.query, outcome=hint.outcome)


def _flag(turn: Turn, flags: Sequence[str]) -> None:
    if flags:
        turn.flags = [*turn.flags, *flags]
        turn.format_ok = False
