"""The action graph of the DAG agent, and the seam for a layer over it (TAEC, appendix A.1).

One node a search, made by the acting model: an edge is its claim that the search follows from an earlier
one. Pictures are kept under the node that admitted them. How the graph is shown never changes what it stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from visor.env.tokens import estimate_tokens
from visor.retrieval.base import ScoredPage

ROOT = "root"
ID_TAKEN = "node id taken"
UNKNOWN_PARENT = "unknown parent"


@dataclass
class GraphNode:
    """The root, or one search."""

    node_id: str
    parents: list[int]
    """Indices of the nodes it follows from, all older."""
    query: str
    summary: str | None = None
    """What the model wrote about the pages; None until then."""
    pages: list[str] = field(default_factory=list)
    """Pages that it put into the context, in order."""


@dataclass
class MemoryEntry:
    """A page kept for later prompts."""

    page_id: str
    node: int
    priority: int


class ActionGraph:
    """Nodes in the order they were made; the first is the root, which stands for the question."""

    def __init__(self, question: str) -> None:
        self.nodes = [GraphNode(ROOT, [], question)]
        self.memory: list[MemoryEntry] = []
        """In the order in which the pages were first kept."""
        self.answer: dict[str, Any] | None = None
        """Parents and text of the answer node."""

    @property
    def searches(self) -> list[GraphNode]:
        return self.nodes[1:]

    @property
    def pending(self) -> GraphNode | None:
        """The search that has not been summarised yet."""
        last = self.nodes[-1]
        return last if len(self.nodes) > 1 and last.summary is None else None

    @property
    def parents(self) -> list[list[int]]:
        return [node.parents for node in self.nodes]

    @property
    def seen(self) -> set[str]:
        """Pages that some search has put into the context."""
        return {page_id for node in self.nodes for page_id in node.pages}

    def add_search(self, node_id: str, parent_ids: Sequence[str], query: str) -> tuple[GraphNode, list[str]]:
        """Add a search. Small mistakes of the model are mended and named in the flags: an id that is missing
        or taken gets another, unknown parents are left out, and without a parent it is the root."""
        flags = []
        known = {node.node_id: index for index, node in enumerate(self.nodes)}
        if node_id in known:
            flags.append(ID_TAKEN)
        if not node_id or node_id in known:
            stem, number = node_id or "search", len(self.nodes)
            node_id = f"{stem}_{number}"
            while node_id in known:
                number += 1
                node_id = f"{stem}_{number}"
        parents, unknown = self.resolve(parent_ids)
        if unknown:
            flags.append(UNKNOWN_PARENT)
        node = GraphNode(node_id, parents, query)
        self.nodes.append(node)
        return node, flags

    def resolve(self, parent_ids: Sequence[str]) -> tuple[list[int], bool]:
        """Indices of the named nodes, each once, the root when none is known; and whether any is unknown."""
        known = {node.node_id: index for index, node in enumerate(self.nodes)}
        found = list(dict.fromkeys(known[name] for name in parent_ids if name in known))
        return found or [0], any(name not in known for name in parent_ids)

    def keep(self, page_id: str, priority: int) -> None:
        """Keep a page under the node that admitted it, or give one that is kept already a new priority."""
        for entry in self.memory:
            if entry.page_id == page_id:
                entry.priority = priority
                return
        node = next(index for index, node in enumerate(self.nodes) if page_id in node.pages)
        self.memory.append(MemoryEntry(page_id, node, priority))

    def record(self) -> dict[str, Any]:
        """The whole graph as plain data, for the trajectory's `meta`."""
        nodes = [
            {
                "id": node.node_id,
                "parents": [self.nodes[parent].node_id for parent in node.parents],
                "query": node.query,
                "summary": node.summary,
                "pages": list(node.pages),
                "memory": {e.page_id: e.priority for e in self.memory if e.node == index},
            }
            for index, node in enumerate(self.nodes)
        ]
        return {"nodes": nodes, "answer": self.answer}


@dataclass(frozen=True)
class Hint:
    """What the next prompt tells the model beside the graph."""

    kind: Literal["dead_end", "early_stop"]
    query: str = ""
    outcome: str = ""
    """How a dead end ended: "no result", "partial" or "unclear"."""


class GraphPolicy(Protocol):
    """Decides which pages a search admits, how the graph is shown, and what is shown again."""

    name: str

    @property
    def reported_slots(self) -> Sequence[str]:
        """Slots whose resolution the model is asked to report; none = it is not asked."""
        ...

    def pool_size(self, k: int) -> int:
        """How many candidates to ask the retriever for."""
        ...

    def admit(self, query: str, candidates: Sequence[ScoredPage], k: int, graph: ActionGraph) -> list[str]:
        """At most `k` of the candidates, in the order shown; those seen before are taken out afterwards."""
        ...

    def render(self, graph: ActionGraph) -> list[dict[str, Any]]:
        """The nodes as the prompt shows them, oldest first."""
        ...

    def hints(self, graph: ActionGraph) -> list[Hint]: ...

    def retained(self, graph: ActionGraph, text: str) -> list[tuple[MemoryEntry, int]]:
        """The pages that are shown again, in the order of memory, each with its pixels. `text`: of the prompt
        around them."""
        ...

    def report(self, settled: Sequence[str]) -> None:
        """Take in which slots the model says are settled."""
        ...

    def describe(self) -> dict[str, Any]:
        """Settings and decisions so far, for the trajectory's `meta`."""
        ...


@dataclass
class PlainGraphPolicy:
    """The plain DAG agent: retriever order, every node in full, no hints; the pages kept last share a fixed
    budget evenly (uniform relevance)."""

    memory_images: int = 5
    memory_pixels: int = 600_000
    page_min_pixels: int = 4 * 28 * 28
    page_max_pixels: int = 300_000
    pressure_onset_tokens: int | None = None
    """Text tokens from which the budget grows by up to `pressure_factor`; None = it is fixed."""
    pressure_factor: float = 0.15

    name = "none"
    reported_slots: Sequence[str] = ()

    def pool_size(self, k: int) -> int:
        return k

    def admit(self, query: str, candidates: Sequence[ScoredPage], k: int, graph: ActionGraph) -> list[str]:
        return [hit.page_id for hit in candidates[:k]]

    def render(self, graph: ActionGraph) -> list[dict[str, Any]]:
        return [full_node(graph, index) for index in range(len(graph.nodes))]

    def hints(self, graph: ActionGraph) -> list[Hint]:
        return []

    def retained(self, graph: ActionGraph, text: str) -> list[tuple[MemoryEntry, int]]:
        budget = float(self.memory_pixels)
        if self.pressure_onset_tokens is not None:
            onset = self.pressure_onset_tokens
            x = min(max((estimate_tokens(text) - onset) / onset, 0.0), 1.0)
            budget *= 1 + self.pressure_factor * x
        count = min(self.memory_images, len(graph.memory), int(budget // self.page_min_pixels))
        shown = graph.memory[len(graph.memory) - count :]
        return [(entry, min(int(budget // count), self.page_max_pixels)) for entry in shown]

    def report(self, settled: Sequence[str]) -> None:
        """Nothing depends on it here."""

    def describe(self) -> dict[str, Any]:
        return {}


def full_node(graph: ActionGraph, index: int) -> dict[str, Any]:
    """A node with all that it stores; the root is the question."""
    node = graph.nodes[index]
    if not index:
        return {"id": node.node_id, "question": node.query}
    shown = {**named_node(graph, index), "query": node.query}
    return shown if node.summary is None else shown | {"summary": node.summary}


def named_node(graph: ActionGraph, index: int) -> dict[str, Any]:
    """A node's id and the ids of its parents."""
    node = graph.nodes[index]
    return {"id": node.node_id, "parents": [graph.nodes[parent].node_id for parent in node.parents]}
