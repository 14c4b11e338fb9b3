"""Operator M over a VISOR policy: in what form the evidence of earlier pages stands in the block."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from visor.env.evidence import entry_parts
from visor.env.policy import EpisodeView, EvidenceEntry
from visor.env.tokens import estimate_tokens
from visor.taec.config import ExposureConfig
from visor.taec.exposure import CUES_FILE, Role, condense, load_cues, persistence, role, shortest, trace
from visor.taec.text_budget import fit

Lines = list[str]


@dataclass(frozen=True)
class _Shown:
    """How an entry is shown."""

    role: Role | None
    """None = recent: in the window or among the newest."""
    lines: Lines
    shortened: str = ""
    """`one sentence` or `left out`, where L_t asks for it."""


class EvidenceExposure:
    """The forms of one episode's evidence entries (eq. 3), within the text budget of eq. 1."""

    def __init__(self, config: ExposureConfig, decay: float) -> None:
        """`decay`: λ of text."""
        self.config = config
        self.cues = load_cues(config.cues or CUES_FILE)
        self.record: list[dict] = []
        """One entry for each change in how a piece of evidence is shown."""
        self._decay = decay
        self._noted: dict[str, tuple[Role | None, str]] = {}
        self._planned: Sequence[EvidenceEntry] | None = None
        self._plan: dict[str, _Shown] = {}
        self._planned_length = 0

    def render(self, entry: EvidenceEntry, view: EpisodeView) -> Lines:
        """The lines of an entry: all thoughts while it is in the window or among the newest.

        After that its latest thought tells its role: active = all thoughts, resolved = that thought's first
        confident sentence, failed = one line naming the query. Where all entries together take more than
        `text_budget_tokens`, older ones are shortened further (`visor.taec.text_budget`).
        """
        # One plan for a list of entries, which is rendered entry by entry.
        if self._planned is not view.entries or self._planned_length != len(view.entries):
            self._plan = self._planned_for(view)
            self._planned, self._planned_length = view.entries, len(view.entries)
        shown = self._plan[entry.page_id]
        self._note(entry, shown, view)
        return shown.lines

    def _planned_for(self, view: EpisodeView) -> dict[str, _Shown]:
        order = sorted(entry.search_index for entry in view.entries)
        recent: list[EvidenceEntry] = []
        older: list[EvidenceEntry] = []
        for entry in sorted(view.entries, key=lambda entry: entry.search_index):
            later = len(order) - bisect_right(order, entry.search_index)
            kept = entry.in_window or later < self.config.keep_newest
            (recent if kept else older).append(entry)
        plan = {entry.page_id: _Shown(None, entry.thoughts) for entry in recent}
        forms = [self._forms(entry, view) for entry in older]
        for entry, shown, level in zip(older, forms, self._levels(recent, older, forms, view)):
            plan[entry.page_id] = shown[level]
        return plan

    def _forms(self, entry: EvidenceEntry, view: EpisodeView) -> list[_Shown]:
        """The forms of an entry outside the window, the fullest first."""
        latest = entry.thoughts[-1] if entry.thoughts else ""
        current = role(latest, self.cues)
        if current == Role.FAILED:
            fullest = [trace(self.config.trace, view.queries[entry.search_index])]
        elif current == Role.RESOLVED:
            fullest = [condense(latest, self.cues)]
        else:
            fullest = entry.thoughts
        forms = [_Shown(current, fullest)]
        if current != Role.FAILED:
            # Also where that is no shorter: what a sentence holds goes when other sentences go.
            sentence = [shortest(latest, self.cues)]
            forms.append(_Shown(current, sentence, "one sentence" if sentence != fullest else ""))
        return [*forms, _Shown(current, [], "left out")]

    def _levels(
        self,
        recent: Sequence[EvidenceEntry],
        older: Sequence[EvidenceEntry],
        forms: Sequence[Sequence[_Shown]],
        view: EpisodeView,
    ) -> list[int]:
        """Which form each of the older entries is shown in, beside the recent ones in full."""
        budget = self.config.text_budget_tokens
        if budget is None:
            return [0] * len(older)
        taken = sum(_tokens(entry, entry.thoughts, view) for entry in recent)
        if view.prompts is not None:
            taken += estimate_tokens(view.prompts.evidence_header + view.prompts.separator)
        sizes = [[_tokens(entry, form.lines, view) for form in shown] for entry, shown in zip(older, forms)]
        return fit(sizes, budget - taken)

    def _note(self, entry: EvidenceEntry, shown: _Shown, view: EpisodeView) -> None:
        """Record how an entry is shown, once for each change: contexts are built again and again. An entry
        starts in full."""
        if self._noted.get(entry.page_id, (None, "")) == (shown.role, shown.shortened):
            return
        self._noted[entry.page_id] = shown.role, shown.shortened
        age = len(view.queries) - 1 - entry.search_index
        self.record.append(
            {
                "page_id": entry.page_id,
                "searches": len(view.queries),
                "role": shown.role.value if shown.role else "recent",
                "persistence": round(persistence(self._decay, age), 6),
            }
            | ({"shortened": shown.shortened} if shown.shortened else {})
        )


def _tokens(entry: EvidenceEntry, lines: Lines, view: EpisodeView) -> int:
    """Tokens of an entry in the block, its heading and what stands between the parts included."""
    if not lines:
        return 0
    if view.prompts is None:
        return estimate_tokens("\n".join(lines) + "\n")
    separator = view.prompts.separator
    return estimate_tokens("".join(part + separator for part in entry_parts(entry, lines, view.prompts)))
