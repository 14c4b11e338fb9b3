"""A layer asked beside the policy that decides: what it would have done, nothing of it carried out.

The deciding policy is the recorded run's own, so that a replay gives the recorded trajectory and every reply
answers the context that it was written to. The layer sees the same state and is asked the same questions.
What it says is kept for the turn, beside what was done.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from visor.env.evidence import evidence_block
from visor.env.graph import ActionGraph, GraphPolicy, Hint, MemoryEntry
from visor.env.policy import EpisodeView, EvidenceEntry, EvidencePolicy, ShownPicture
from visor.env.prompts import PromptSet
from visor.retrieval.base import ScoredPage
from visor.systems.dag import prompt_text
from visor.systems.prompts import DagPrompts
from visor.types import Message, TextPart


class Notes:
    """What the layer said since the last turn."""

    def __init__(self) -> None:
        self._parts: dict[str, Any] = {}

    def put(self, name: str, value: Any) -> None:
        self._parts[name] = value

    def take(self) -> dict[str, Any]:
        """The notes of the turn that has just ended."""
        parts, self._parts = self._parts, {}
        return parts


class ShadowEvidence:
    """An `EvidencePolicy` that does what `base` says and notes what `layer` would have said."""

    def __init__(self, base: EvidencePolicy, layer: EvidencePolicy, prompts: PromptSet) -> None:
        self.name = base.name
        self.notes = Notes()
        self._base, self._layer, self._prompts = base, layer, prompts
        self._pools = (0, 0)
        self._lines: dict[str, tuple[list[str], list[str]]] = {}
        self._again: tuple[list[ShownPicture], list[ShownPicture]] = ([], [])

    def pool_size(self, top_k: int) -> int:
        self._pools = self._base.pool_size(top_k), self._layer.pool_size(top_k)
        return max(self._pools)

    def select(self, query: str, candidates: Sequence[ScoredPage], view: EpisodeView) -> str | None:
        shown = self._base.select(query, candidates[: self._pools[0]], view)
        wanted = self._layer.select(query, candidates[: self._pools[1]], view)
        details = _newest(self._layer.describe(), "searches")
        self.notes.put(
            "admitted",
            {
                "recorded": [shown] if shown else [],
                "layer": [wanted] if wanted else [],
                "pool": len(candidates[: self._pools[1]]),
                "details": details,
            },
        )
        return shown

    def render(self, entry: EvidenceEntry, view: EpisodeView) -> list[str]:
        lines = self._base.render(entry, view), self._layer.render(entry, view)
        self._lines[entry.page_id] = lines
        changed = [
            {"of": page_id, "recorded": before, "layer": after}
            for page_id, (before, after) in self._lines.items()
            if before != after
        ]
        self.notes.put("rendered", changed)
        return lines[0]

    def represent(self, earlier: Sequence[ShownPicture], view: EpisodeView) -> list[ShownPicture]:
        self._again = self._base.represent(earlier, view), self._layer.represent(earlier, view)
        return self._again[0]

    def allocate(
        self, pictures: Sequence[ShownPicture], context: Sequence[Message], view: EpisodeView
    ) -> list[int]:
        recorded = self._base.allocate(pictures, context, view)
        own = [*self._again[1], *pictures[len(self._again[0]) :]]
        count = len(_allocations(self._layer))
        wanted = self._layer.allocate(own, self._as_layer_shows(context, view), view)
        self.notes.put("pictures", _pixels(pictures, recorded, own, wanted))
        self.notes.put("budget", _budget(self._layer, count))
        return recorded

    def _as_layer_shows(self, context: Sequence[Message], view: EpisodeView) -> list[Message]:
        """The context with its evidence as the layer renders it: B_t follows the text after exposure."""
        before, after = (
            evidence_block(view.entries, partial(self._shown, which), self._prompts) for which in (0, 1)
        )
        return [_with_text(message, before, after) for message in context]

    def _shown(self, which: int, entry: EvidenceEntry) -> list[str]:
        """Its lines as base (0) or layer (1) rendered them last."""
        return self._lines.get(entry.page_id, (entry.thoughts, entry.thoughts))[which]

    def describe(self) -> dict[str, Any]:
        return self._base.describe()


class ShadowGraph:
    """The same for the DAG agent's `GraphPolicy`."""

    def __init__(self, base: GraphPolicy, layer: GraphPolicy, prompts: DagPrompts) -> None:
        self.name = base.name
        self.notes = Notes()
        self._base, self._layer, self._prompts = base, layer, prompts
        self._pools = (0, 0)

    @property
    def reported_slots(self) -> Sequence[str]:
        return self._base.reported_slots

    def pool_size(self, k: int) -> int:
        self._pools = self._base.pool_size(k), self._layer.pool_size(k)
        return max(self._pools)

    def admit(self, query: str, candidates: Sequence[ScoredPage], k: int, graph: ActionGraph) -> list[str]:
        shown = self._base.admit(query, candidates[: self._pools[0]], k, graph)
        wanted = self._layer.admit(query, candidates[: self._pools[1]], k, graph)
        new = [[page for page in pages if page not in graph.seen] for pages in (shown, wanted)]
        details = _newest(self._layer.describe(), "searches")
        pool = len(candidates[: self._pools[1]])
        self.notes.put("admitted", {"recorded": new[0], "layer": new[1], "pool": pool, "details": details})
        return shown

    def render(self, graph: ActionGraph) -> list[dict[str, Any]]:
        before = self._base.render(graph)
        shown = [{node["id"]: node for node in nodes} for nodes in (before, self._layer.render(graph))]
        changed = [
            {"of": name, "recorded": old, "layer": new}
            for name in (node.node_id for node in graph.nodes)
            if (old := shown[0].get(name)) != (new := shown[1].get(name))
        ]
        self.notes.put("rendered", changed)
        return before

    def hints(self, graph: ActionGraph) -> list[Hint]:
        recorded = self._base.hints(graph)
        self.notes.put("hints", [_hint(hint) for hint in self._layer.hints(graph)])
        return recorded

    def retained(self, graph: ActionGraph, text: str) -> list[tuple[MemoryEntry, int]]:
        recorded = self._base.retained(graph, text)
        own_text = prompt_text(self._prompts, graph.nodes[0].query, self._layer, graph)
        count = len(_allocations(self._layer))
        wanted = self._layer.retained(graph, f"{self._prompts.system}\n{own_text}")
        before = {entry.page_id: pixels for entry, pixels in recorded}
        after = {entry.page_id: pixels for entry, pixels in wanted}
        pictures = [
            {"page_id": page, "crop": False, "recorded": before.get(page, 0), "layer": after.get(page, 0)}
            for page in dict.fromkeys([*before, *after])
        ]
        self.notes.put("pictures", pictures)
        self.notes.put("budget", _budget(self._layer, count))
        return recorded

    def report(self, settled: Sequence[str]) -> None:
        self._base.report(settled)
        self._layer.report(settled)

    def describe(self) -> dict[str, Any]:
        return self._base.describe()


def _newest(description: dict[str, Any], part: str) -> dict[str, Any] | None:
    """The last entry of a list of decisions; None where the operator that writes it is off."""
    found = description.get(part) or []
    return found[-1] if found else None


def _allocations(layer: EvidencePolicy | GraphPolicy) -> list[dict[str, Any]]:
    return layer.describe().get("allocations") or []


def _budget(layer: EvidencePolicy | GraphPolicy, count: int) -> dict[str, int] | None:
    """B_t of an allocation made since there were `count` of them."""
    made = _allocations(layer)[count:]
    return {"pixels": made[-1]["budget"], "text_tokens": made[-1]["text_tokens"]} if made else None


def _pixels(
    pictures: Sequence[ShownPicture],
    recorded: Sequence[int],
    own: Sequence[ShownPicture],
    wanted: Sequence[int],
) -> list[dict[str, Any]]:
    """One entry a picture of either; 0 = not shown."""
    before = {picture.turn_index: pixels for picture, pixels in zip(pictures, recorded, strict=True)}
    after = {picture.turn_index: pixels for picture, pixels in zip(own, wanted, strict=True)}
    every = {picture.turn_index: picture for picture in (*pictures, *own)}
    return [
        {
            "page_id": picture.image.page_id,
            "crop": picture.image.box is not None,
            "recorded": before.get(turn, 0),
            "layer": after.get(turn, 0),
        }
        for turn, picture in sorted(every.items())
    ]


def _hint(hint: Hint) -> dict[str, str]:
    return {"kind": hint.kind, "query": hint.query, "outcome": hint.outcome}


def _with_text(message: Message, before: str, after: str) -> Message:
    if not before or message.role != "user" or message.text != before:
        return message
    return message.model_copy(update={"content": [TextPart(text=after)] if after else []})
