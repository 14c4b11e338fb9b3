"""The layer over the DAG agent: TAEC's operators as a `GraphPolicy` (appendices A.2 to A.5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from visor.env.graph import (
    ActionGraph,
    GraphPolicy,
    Hint,
    MemoryEntry,
    PlainGraphPolicy,
)
from visor.env.tokens import estimate_tokens
from visor.retrieval.base import ScoredPage
from visor.taec.admission import Candidate, Coefficients, admit
from visor.taec.captions import Captions
from visor.taec.config import TaecConfig
from visor.taec.energy import MemoryItem, energies, strongest
from visor.taec.graph_exposure import GraphExposure
from visor.taec.pictures import MemoryPicture, PictureBudgets
from visor.taec.requirements import RequirementState, SlotSet, rule_slots
from visor.taec.text import normalise

MIN_SEARCHES = 2
"""Allocation acts from three graph nodes on, the root one of them."""


class TaecGraphPolicy:
    """Decides, for one question, which pages a search admits (A), how the graph is shown and what hints go
    with it (M), and which kept pages are shown again at how many pixels (V).

    An operator that is off leaves its part to the plain agent; with all of them off nothing differs from it.
    """

    def __init__(
        self,
        config: TaecConfig,
        question: str,
        captions: Captions,
        plain: PlainGraphPolicy,
        slots: SlotSet | None = None,
    ) -> None:
        """`slots`: as extracted before; None = the rules (ValueError when the config asks for a model)."""
        if slots is None and config.operators and config.slot_extractor == "model":
            raise ValueError("slot_extractor is 'model', but no slots were given")
        self.config = config
        self.plain = plain
        self.captions = captions
        self.slots = slots or rule_slots(question, config.max_slots)
        self.name = f"taec-{config.operators}" if config.operators else "none"
        admission = config.admission
        self._coefficients = Coefficients(
            admission.alpha, admission.beta, admission.eta, admission.redundancy
        )
        self._state = RequirementState.uniform(self.slots.keywords)
        self._budgets = PictureBudgets(config.allocation, captions, self.slots.keywords)
        self._searches: list[dict] = []
        self._exposure = GraphExposure(config.exposure, config.decay.text)

    # ------------------------------------------------------------ requirements

    @property
    def reported_slots(self) -> Sequence[str]:
        return self.slots.keywords if self.config.semantic_state and self.config.operators else ()

    def report(self, settled: Sequence[str]) -> None:
        """Slots that the model names as settled carry no weight from now on."""
        named = {normalise(slot) for slot in settled}
        for slot in self.slots.keywords:
            if normalise(slot) in named:
                self._state.support[slot] = 1.0

    # ------------------------------------------------------------ admission

    def pool_size(self, k: int) -> int:
        admission = self.config.admission
        return max(k, admission.pool_size) if admission.enabled else k

    def admit(self, query: str, candidates: Sequence[ScoredPage], k: int, graph: ActionGraph) -> list[str]:
        """Eq. 2 over the pool, the retriever's best page kept; S are the pages admitted in this call."""
        if not self.config.admission.enabled:
            return self.plain.admit(query, candidates, k, graph)
        if self.config.admission.slot_weights == "open":
            self._state.add_support(node.summary or "" for node in graph.searches)
        pool = [Candidate(hit.page_id, hit.score, self.captions.text(hit.page_id)) for hit in candidates]
        chosen = admit(pool, k, self._state.open_weights(), self._coefficients)
        rank = {hit.page_id: number for number, hit in enumerate(candidates)}
        admitted = [
            {
                "page_id": candidate.page_id,
                "rank": rank[candidate.page_id],
                "gain": gain.record(),
                "text": self.captions.kind(candidate.page_id),
            }
            for candidate, gain in chosen
        ]
        self._searches.append({"query": query, "pool": len(pool), "admitted": admitted})
        return [candidate.page_id for candidate, _ in chosen]

    # ------------------------------------------------------------ exposure

    def render(self, graph: ActionGraph) -> list[dict[str, Any]]:
        """The nodes, older ones in the form of their roles; see `GraphExposure`."""
        return self._exposure.render(graph) if self.config.exposure.enabled else self.plain.render(graph)

    def hints(self, graph: ActionGraph) -> list[Hint]:
        """Dead ends and early stop; see `GraphExposure`."""
        return self._exposure.hints(graph) if self.config.exposure.enabled else self.plain.hints(graph)

    # ------------------------------------------------------------ allocation

    def retained(self, graph: ActionGraph, text: str) -> list[tuple[MemoryEntry, int]]:
        """The pages of most energy, at the pixels of eq. 4; the plain agent's before the second search."""
        allocation = self.config.allocation
        if not allocation.enabled or len(graph.searches) < MIN_SEARCHES or not graph.memory:
            return self.plain.retained(graph, text)
        items = [MemoryItem(entry.node, "page", entry.priority) for entry in graph.memory]
        energy = energies(graph.parents, items, decay=self.config.decay.model_dump(), gamma=allocation.gamma)
        chosen = strongest(energy, self.plain.memory_images)
        pictures = [MemoryPicture(graph.memory[index].page_id, energy[index]) for index in chosen]
        pixels = self._budgets.allocate(
            pictures,
            text_tokens=estimate_tokens(text),
            searches=len(graph.searches),
            page_max_pixels=self.plain.page_max_pixels,
        )
        return [(graph.memory[index], value) for index, value in zip(chosen, pixels) if value]

    # ------------------------------------------------------------ record

    def describe(self) -> dict[str, Any]:
        """Operators, settings, slots and every decision; {} with all operators off."""
        operators = self.config.operators
        if not operators:
            return {}
        return {
            "operators": operators,
            "settings": self.config.model_dump(mode="json"),
            "slots": self.slots.record()
            | {
                "settled": [slot for slot, share in self._state.support.items() if share >= 1],
            },
            "searches": list(self._searches),
            "renders": list(self._exposure.record),
            "dead_ends": dict(self._exposure.dead_ends),
            "allocations": list(self._budgets.record),
        }


def make_graph_policy(
    config: TaecConfig | None,
    question: str,
    captions: Captions,
    plain: PlainGraphPolicy,
    slots: SlotSet | None = None,
) -> GraphPolicy:
    """The policy of one question: the plain agent's when there is no layer."""
    return plain if config is None else TaecGraphPolicy(config, question, captions, plain, slots)
