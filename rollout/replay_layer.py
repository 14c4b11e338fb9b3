"""`visor replay RUN --taec …`: what the layer would have done, turn by turn, on recorded trajectories."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, cast

from rollout.differences import compare_trajectories
from rollout.layers import layer_config
from rollout.recorded_run import RecordedClient, RecordedRetriever, RecordedRun, recorded_slots
from rollout.shadow import ShadowEvidence, ShadowGraph
from rollout.trace import printable
from visor.env.graph import GraphPolicy
from visor.env.policy import EvidencePolicy
from visor.env.prompts import load_prompts
from visor.systems.prompts import DagPrompts, load_system_prompts
from visor.taec.config import TaecConfig
from visor.taec.requirements import SlotSet, rule_slots
from visor.types import Record, Search, Trajectory, Turn


class LayerTurn(Record):
    """One turn of the record, and the layer's decisions at it."""

    turn: int
    """From 1."""
    action: str
    query: str | None = None
    admitted: dict[str, Any] | None = None
    """Of a search: `recorded` and `layer` page ids, size of the `pool`, and the layer's `details`."""
    rendered: list[dict[str, Any]] = []
    """Evidence or graph nodes that the layer shows in another form: `of`, `recorded`, `layer`."""
    pictures: list[dict[str, Any]] = []
    """Pictures of earlier turns, each at its `recorded` pixels and the `layer`'s; 0 = left out."""
    budget: dict[str, int] | None = None
    """B_t in pixels and the text tokens it follows from; None where eq. 4 does not act."""
    hints: list[dict[str, str]] = []
    """Of the DAG agent."""

    @property
    def other_page(self) -> bool:
        return self.admitted is not None and self.admitted["recorded"] != self.admitted["layer"]

    @property
    def other_pixels(self) -> bool:
        return any(picture["recorded"] != picture["layer"] for picture in self.pictures)


class LayerReplay(Record):
    """A recorded trajectory under the layer's eyes."""

    question_id: str
    sample_index: int
    question: str
    operators: str
    slots: list[str]
    slots_from: str
    turns: list[LayerTurn]
    differs: list[str] = []
    """Fields in which the environment no longer gives the record; decisions from there on may be off."""


class LayerSummary:
    """How often the layer would have done otherwise, counted over trajectories."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, replay: LayerReplay) -> None:
        self.counts["trajectories"] += 1
        self.counts["differing"] += bool(replay.differs)
        for turn in replay.turns:
            self.counts["turns"] += 1
            self.counts["searches"] += turn.admitted is not None
            self.counts["pages"] += turn.other_page
            self.counts["evidence"] += bool(turn.rendered)
            self.counts["pixels"] += turn.other_pixels

    def text(self) -> str:
        n = self.counts
        parts = [
            f"{n['trajectories']} trajectories",
            f"{n['pages']} of {n['searches']} searches admit other pages",
            f"{n['evidence']} of {n['turns']} contexts show evidence in another form",
            f"{n['pixels']} show pictures at other pixels",
        ]
        if n["differing"]:
            parts.append(f"{n['differing']} trajectories are no longer what the environment gives")
        return ", ".join(parts)


def replay_layer(
    run: RecordedRun,
    switch: str,
    layer: TaecConfig | None = None,
    question_id: str | None = None,
    limit: int | None = None,
) -> Iterator[LayerReplay]:
    """The decisions of the layer `switch` (on, A, AM, …) at each turn of each trajectory; no model is asked.

    `layer`: its settings; None = those of the run. ValueError when it is off, when the run's system takes no
    layer, or when there is no trajectory (of `question_id`).
    """
    update = {"taec": switch, "taec_config": layer or run.config.taec_config}
    active = layer_config(run.config.model_copy(update=update))
    if active is None or not active.operators:
        raise ValueError("no operator of the layer is on; name some with --taec, such as on, A or AMV")
    chosen = (t for t in run.trajectories() if question_id in (None, t.question_id))
    found = False
    for trajectory in islice(chosen, limit):
        found = True
        yield _replay_one(run, active, trajectory)
    if not found:
        wanted = "" if question_id is None else f" of question {question_id!r}"
        raise ValueError(f"{run.folder} has no trajectory{wanted}")


def _replay_one(run: RecordedRun, active: TaecConfig, trajectory: Trajectory) -> LayerReplay:
    slots = recorded_slots(trajectory) or _rule_slots(active, trajectory.question)
    shadow = _shadow(run, active, trajectory, slots)
    candidates = run.retriever or RecordedRetriever(trajectory)
    system = run.system(RecordedClient(trajectory), candidates, shadow)
    turns: list[LayerTurn] = []

    def on_turn(turn: Turn) -> None:
        turns.append(_layer_turn(turn, shadow.notes.take()))

    replayed = asyncio.run(
        system.solve(
            run.question(trajectory),
            seed=trajectory.seed,
            sample_index=trajectory.sample_index,
            on_turn=on_turn,
        )
    )
    # The layer may ask for a larger pool than the record has.
    differs = [d for d in compare_trajectories(trajectory, replayed) if d.field != "candidates"]
    return LayerReplay(
        question_id=trajectory.question_id,
        sample_index=trajectory.sample_index,
        question=trajectory.question,
        operators=active.operators,
        slots=list(slots.keywords),
        slots_from=slots.extractor,
        turns=turns,
        differs=[f"turn {d.turn + 1}: {d.field}" if d.turn is not None else d.field for d in differs],
    )


def _rule_slots(active: TaecConfig, question: str) -> SlotSet:
    slots = rule_slots(question, active.max_slots)
    if active.slot_extractor == "rules":
        return slots
    return replace(slots, extractor="rules (the record has no slots of a model)")


def _shadow(
    run: RecordedRun, active: TaecConfig, trajectory: Trajectory, slots: SlotSet
) -> ShadowEvidence | ShadowGraph:
    """The run's own policy, with the layer beside it."""
    own = layer_config(run.config)
    base, layer = (run.policy(settings, trajectory, slots) for settings in (own, active))
    if run.config.system == "dag":
        prompts = load_system_prompts(DagPrompts, "dag", run.config.loop.prompts)
        return ShadowGraph(cast("GraphPolicy", base), cast("GraphPolicy", layer), prompts)
    evidence = cast("EvidencePolicy", base), cast("EvidencePolicy", layer)
    return ShadowEvidence(*evidence, load_prompts(run.config.episode.prompts))


def _layer_turn(turn: Turn, notes: dict[str, Any]) -> LayerTurn:
    query = turn.query if isinstance(turn.action, Search) else None
    return LayerTurn(turn=turn.index + 1, action=turn.action.kind, query=query, **notes)


# ---------------------------------------------------------------- text


def layer_text(replay: LayerReplay) -> str:
    """The decisions of one trajectory for the terminal; what is as recorded is one line or none."""
    name = f"{replay.question_id}/{replay.sample_index}"
    lines = [
        f"{name}: {printable(replay.question)}",
        f"   slots ({replay.slots_from}): {', '.join(map(printable, replay.slots)) or 'none'}",
    ]
    for turn in replay.turns:
        what = turn.action + (f": {printable(turn.query)}" if turn.query else "")
        lines.append(f"── turn {turn.turn}  {what}")
        lines += [f"   {line}" for line in _decisions(turn)]
    lines += [f"   note: the environment no longer gives the recorded {field}" for field in replay.differs]
    return "\n".join(lines)


def _decisions(turn: LayerTurn) -> list[str]:
    lines = []
    for change in turn.rendered:
        shown = change["layer"] or []
        text = shown if isinstance(shown, list) else [str(value) for value in shown.values()]
        lines.append(f"M  {change['of']} shown as: {printable(' / '.join(text)) or 'nothing'}")
    for hint in turn.hints:
        lines.append(f"M  hint: {hint['kind']} {printable(hint['query'])} {hint['outcome']}".rstrip())
    if turn.budget:
        lines.append(f"V  budget {turn.budget['pixels']} px at {turn.budget['text_tokens']} text tokens")
    for picture in turn.pictures:
        label = f"{picture['page_id']}{' (crop)' if picture['crop'] else ''}"
        if picture["recorded"] != picture["layer"]:
            lines.append(f"V  {label}: {picture['layer']} px, recorded {picture['recorded']}")
        elif turn.budget:
            lines.append(f"V  {label}: {picture['layer']} px, as recorded")
    if turn.admitted is not None:
        recorded, wanted = (", ".join(turn.admitted[side]) or "none" for side in ("recorded", "layer"))
        ending = "as recorded" if recorded == wanted else f"recorded {recorded}"
        lines.append(f"A  {wanted} of a pool of {turn.admitted['pool']}, {ending}")
    return lines
