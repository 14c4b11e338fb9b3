"""Operator M over the DAG agent: in what form the graph stands in the prompt, and the hints beside it."""

from __future__ import annotations

import json
import re
from typing import Any

from visor.env.graph import ActionGraph, GraphNode, Hint, full_node, named_node
from visor.env.tokens import estimate_tokens
from visor.taec.config import ExposureConfig
from visor.taec.exposure import CUES_FILE, Role, condense, load_cues, persistence, role, shortest, trace
from visor.taec.text import normalise
from visor.taec.text_budget import fit

Shown = dict[str, Any]
"""A node as the prompt shows it; {} = left out."""

_NUMBER = re.compile(r"\d|[一二三四五六七八九十百千万亿]{2,}")


class GraphExposure:
    """The forms of one question's nodes (eq. 3), within the text budget of eq. 1, and its dead ends."""

    def __init__(self, config: ExposureConfig, decay: float) -> None:
        """`decay`: λ of text."""
        self.config = config
        self.cues = load_cues(config.cues or CUES_FILE)
        self.record: list[dict] = []
        """One entry for each change in how an older node is shown."""
        self.dead_ends: dict[str, str] = {}
        """Query in normal form → how it ended."""
        self._decay = decay
        self._noted: dict[int, tuple[Role, str]] = {}

    def render(self, graph: ActionGraph) -> list[Shown]:
        """The root and the newest searches in full; an older one by its role (appendix A.4).

        Where the graph's JSON takes more than `text_budget_tokens`, older nodes are shown with one sentence
        of their summaries and then left out (`visor.taec.text_budget`). A node that is left out is stored as
        before: the model may still name it as a parent.
        """
        self._note_dead_ends(graph)
        first_full = max(1, len(graph.nodes) - self.config.keep_newest)
        older = range(1, first_full)
        recent = [full_node(graph, index) for index in range(first_full, len(graph.nodes))]
        root = full_node(graph, 0)
        roles = [self._role(graph.nodes[index]) for index in older]
        forms = [self._forms(graph, index, current) for index, current in zip(older, roles)]
        levels = self._levels([root, *recent], forms)
        for index, current, shown, level in zip(older, roles, forms, levels):
            self._note(graph, index, current, _shortened(shown, level))
        chosen = [shown[level] for shown, level in zip(forms, levels)]
        return [root, *(node for node in chosen if node), *recent]

    def _role(self, node: GraphNode) -> Role:
        if normalise(node.query) in self.dead_ends:
            return Role.FAILED
        return role(node.summary or "", self.cues)

    def _forms(self, graph: ActionGraph, index: int, current: Role) -> list[Shown]:
        """The forms of an older node, the fullest first."""
        node, full = graph.nodes[index], full_node(graph, index)
        summary = node.summary or ""
        if current == Role.FAILED:
            return [{**named_node(graph, index), "trace": trace(self.config.trace, node.query)}, {}]
        if current == Role.RESOLVED:
            full |= {"summary": condense(summary, self.cues)}
        # One sentence also where that is no shorter: what it holds goes when other sentences go.
        return [full, full | {"summary": shortest(summary, self.cues)} if summary else full, {}]

    def _levels(self, in_full: list[Shown], forms: list[list[Shown]]) -> list[int]:
        budget = self.config.text_budget_tokens
        if budget is None:
            return [0] * len(forms)
        return fit(
            [[_tokens(node) for node in shown] for shown in forms], budget - sum(map(_tokens, in_full))
        )

    def _note(self, graph: ActionGraph, index: int, current: Role, shortened: str) -> None:
        """Record how a node is shown, once for each change."""
        if self._noted.get(index) == (current, shortened):
            return
        self._noted[index] = current, shortened
        newest = len(graph.nodes) - 1
        self.record.append(
            {
                "node": graph.nodes[index].node_id,
                "searches": newest,
                "role": current.value,
                "persistence": round(persistence(self._decay, newest - index), 6),
            }
            | ({"shortened": shortened} if shortened else {})
        )

    # ------------------------------------------------------------ hints

    def hints(self, graph: ActionGraph) -> list[Hint]:
        """Dead ends, in the order they were met; and early stop when the newest summary states a number as
        established."""
        self._note_dead_ends(graph)
        found: list[Hint] = []
        for node in graph.searches:
            outcome = self.dead_ends.get(normalise(node.query))
            if outcome and all(normalise(hint.query) != normalise(node.query) for hint in found):
                found.append(Hint("dead_end", node.query, outcome))
        newest = graph.nodes[-1].summary or ""
        if role(newest, self.cues) == Role.RESOLVED and _NUMBER.search(newest):
            found.append(Hint("early_stop"))
        return found

    def _note_dead_ends(self, graph: ActionGraph) -> None:
        for node in graph.searches:
            if node.summary and self.cues.failed(node.summary):
                self.dead_ends.setdefault(normalise(node.query), self._outcome(node.summary))

    def _outcome(self, summary: str) -> str:
        if self.cues.confident(summary):
            return "partial"
        return "unclear" if self.cues.unclear(summary) else "no result"


def _tokens(node: Shown) -> int:
    """Tokens of a node in the prompt's JSON, with what stands between two nodes."""
    return estimate_tokens(json.dumps(node, ensure_ascii=False) + ",\n ") if node else 0


def _shortened(forms: list[Shown], level: int) -> str:
    """What the text budget has made of a node; "" = nothing."""
    if forms[level] == forms[0]:
        return ""
    return "one sentence" if forms[level] else "left out"
