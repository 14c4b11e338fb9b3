"""The evidence space: what the policy wrote about each page (VISOR section 3.2, eq. 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from visor.env.policy import EvidenceEntry
from visor.env.prompts import PromptSet, fill
from visor.types import Observation, ObservationKind

RenderEntry = Callable[[EvidenceEntry], list[str]]


class EvidenceSpace:
    """At most two thoughts a page, keyed by the page: on first reading it, and on reading its crop.

    A thought counts only when it answers a page or a crop. One before any page, after an invalid action or
    after a search that brought no page is no evidence, nor is one of `min_chars` characters or fewer.
    """

    def __init__(self, min_chars: int) -> None:
        self._min_chars = min_chars
        self._entries: dict[str, EvidenceEntry] = {}
        self._written: dict[str, int] = {}

    @property
    def entries(self) -> list[EvidenceEntry]:
        """Entries in the order in which their pages were first written about."""
        return list(self._entries.values())

    def record(self, think: str, answered: Observation | None, search_index: int, turn: int) -> None:
        """Store the thought of call `turn`, made in answer to the observation `answered`.

        `search_index` is the 0-based search that showed the page of that observation.
        """
        if answered is None or len(think) <= self._min_chars:
            return
        if answered.kind not in (ObservationKind.PAGE, ObservationKind.CROP):
            return
        page_id = answered.page_ids[0]
        entry = self._entries.setdefault(page_id, EvidenceEntry(page_id, search_index=search_index))
        if answered.kind == ObservationKind.PAGE:
            entry.pre = think
        else:
            entry.post = think
        self._written[page_id] = turn

    def mark_window(self, first_turn: int) -> None:
        """Set each entry's `in_window`: written at `first_turn` or later."""
        for page_id, entry in self._entries.items():
            entry.in_window = self._written[page_id] >= first_turn


def evidence_block(entries: list[EvidenceEntry], render: RenderEntry, prompts: PromptSet) -> str:
    """Return the evidence block, one heading a page and one line a thought; "" while there is none."""
    parts = [part for entry in entries for part in entry_parts(entry, render(entry), prompts)]
    return prompts.join([prompts.evidence_header, *parts]) if parts else ""


def entry_parts(entry: EvidenceEntry, lines: Sequence[str], prompts: PromptSet) -> list[str]:
    """The parts of the block that stand for one entry shown as `lines`; none where there is no line."""
    heading = fill(prompts.evidence_heading, page_id=entry.page_id)
    return [heading, *(fill(prompts.evidence_line, thought=line) for line in lines)] if lines else []
