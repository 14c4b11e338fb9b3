"""A run folder opened for replay: its settings, corpus and index, and stand-ins for model and retriever."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from data.corpus import Corpus
from rollout.build import AgentConfig
from rollout.layers import layer_config
from rollout.manifest import read_manifest
from rollout.recorder import read_lines
from rollout.run_folder import RESULTS_NAME, TRAJECTORIES_NAME
from visor.config import load_config
from visor.env.graph import GraphPolicy
from visor.env.policy import EvidencePolicy, PassThrough
from visor.models.base import ContextTooLong, PolicyClient, Request, Sampling, TooManyImages
from visor.retrieval.base import Retriever, ScoredPage
from visor.retrieval.index import open_index
from visor.systems.registry import SystemParts, build_system, plain_graph_policy
from visor.systems.run import System
from visor.taec.captions import Captions
from visor.taec.config import TaecConfig
from visor.taec.graph_policy import make_graph_policy
from visor.taec.policy import make_evidence_policy
from visor.taec.requirements import SlotSet
from visor.types import Completion, Question, Search, StopReason, Trajectory


class RecordedClient:
    """Gives back the completions of one trajectory, then ends it the way it ended."""

    def __init__(self, trajectory: Trajectory) -> None:
        self.name = trajectory.meta.get("model", "recorded")
        self.takes_tools = trajectory.meta.get("protocol", {}).get("name") == "native"
        self._trajectory = trajectory
        self._completions = [turn.completion for turn in trajectory.turns if not turn.by_system]

    async def complete(self, request: Request) -> Completion:
        if self._completions:
            return self._completions.pop(0)
        if self._trajectory.stop_reason == StopReason.LENGTH:
            raise ContextTooLong("as recorded")
        if self._trajectory.stop_reason == StopReason.IMAGE_LIMIT:
            raise TooManyImages("as recorded")
        raise RuntimeError("the record has no further completion")


class RecordedRetriever:
    """Gives back the recorded candidates of one trajectory's searches, in order: no index is needed."""

    name = "recorded"

    def __init__(self, trajectory: Trajectory) -> None:
        self._searches = [turn for turn in trajectory.turns if isinstance(turn.action, Search)]

    def search(self, query: str, k: int) -> list[ScoredPage]:
        # A search of the record may have been answered without the retriever, as ReAct's repeated ones are.
        while len(self._searches) > 1 and self._searches[0].query != query:
            self._searches.pop(0)
        if not self._searches:
            raise RuntimeError("the record has no further search")
        return [ScoredPage(*candidate) for candidate in self._searches.pop(0).candidates[:k]]


@dataclass
class RecordedRun:
    """One evaluation's folder, and what its trajectories were made with."""

    folder: Path
    config: AgentConfig
    store: Corpus
    retriever: Retriever | None
    """None = the candidates of the record."""

    @cached_property
    def captions(self) -> Captions:
        return Captions(self.store)

    @cached_property
    def _tags(self) -> dict[str, dict]:
        return {row["question_id"]: row.get("tags", {}) for row in read_lines(self.folder / RESULTS_NAME)}

    def trajectories(self) -> Iterator[Trajectory]:
        for record in read_lines(self.folder / TRAJECTORIES_NAME):
            yield Trajectory.model_validate(record)

    def question(self, trajectory: Trajectory) -> Question:
        """As far as the environment may know it."""
        tags = self._tags.get(trajectory.question_id, {})
        return Question(question_id=trajectory.question_id, text=trajectory.question, tags=tags)

    def policy(
        self, layer: TaecConfig | None, trajectory: Trajectory, slots: SlotSet | None
    ) -> EvidencePolicy | GraphPolicy:
        """What decides for one trajectory under these settings; None = the plain agent's."""
        question = self.question(trajectory)
        if self.config.system == "dag":
            plain = plain_graph_policy(self.config.loop)
            return make_graph_policy(layer, question.text, self.captions, plain, slots)
        made = layer and make_evidence_policy("on", layer, question, self.store, slots, self.captions)
        return made or PassThrough()

    def system(
        self,
        client: PolicyClient,
        candidates: Retriever,
        policy: EvidencePolicy | GraphPolicy | None = None,
    ) -> System:
        """The run's system around its parts; None = without a layer."""
        episode, loop = self.config.episode, self.config.loop
        parts = SystemParts(client, candidates, self.store, Sampling(), episode, loop)
        if policy is not None:
            made: Any = lambda question: policy  # noqa: E731 - one factory for both kinds
            parts = replace(parts, evidence_policies=made, graph_policies=made)
        return build_system(self.config.system, parts)

    def own_system(self, trajectory: Trajectory, client: PolicyClient, candidates: Retriever) -> System:
        """The system that made the trajectory, its layer with the slots of the record."""
        layer = layer_config(self.config)
        if layer is None:
            return self.system(client, candidates)
        slots = recorded_slots(trajectory)
        if slots is None and layer.slot_extractor == "model":
            # A fault before the slots were known: without a turn nothing depends on them.
            slots = SlotSet((), extractor="none")
        return self.system(client, candidates, self.policy(layer, trajectory, slots))


def open_recorded(
    run: str | Path, corpus: str | Path | None = None, index: str | Path | None = None, recorded: bool = False
) -> RecordedRun:
    """Open a run folder for replay.

    Corpus, index, system and layer are the manifest's unless another `corpus` or `index` is given; another
    corpus comes with its own index, `CORPUS/index/RETRIEVER`, where none is named. `recorded` takes the
    candidates from the record and needs no index; so does a run with frozen retrieval, whose candidates no
    index gives. ValueError when the folder is no run.
    """
    manifest = read_manifest(run)
    made_with = manifest.corpus.get("path")
    own_corpus = corpus is None or (made_with and Path(corpus).resolve() == Path(made_with).resolve())
    if index is None and own_corpus:
        index = manifest.index.get("path")
    paths = {"index": str(index) if index else None}
    if corpus or made_with:
        paths["corpus"] = str(corpus or made_with)
    config = AgentConfig.model_validate(
        {name: value for name, value in manifest.arguments.items() if name in AgentConfig.model_fields}
        | paths
    )
    store = Corpus.open(config.corpus)
    recorded = recorded or "frozen" in manifest.intervention
    retriever = None if recorded else open_index(config.index_path, store, config.retriever)
    return RecordedRun(Path(run), config, store, retriever)


def with_settings(config: AgentConfig, overrides: Sequence[str]) -> TaecConfig:
    """The layer's settings of a run, with `taec_config.KEY=VALUE` changed.

    ValueError for a key that is none, or one outside the layer.
    """
    for pair in overrides:
        if not pair.startswith("taec_config."):
            raise ValueError(f"--set {pair}: only the layer's settings can change, taec_config.KEY=VALUE")
    changed = load_config(TaecConfig, None, [f"--{pair.removeprefix('taec_config.')}" for pair in overrides])
    given = changed.model_dump(exclude_unset=True)
    return TaecConfig.model_validate(_merged(config.taec_config.model_dump(), given))


def _merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for key, value in changes.items():
        inner = isinstance(value, dict) and isinstance(values[key], dict)
        merged[key] = _merged(values[key], value) if inner else value
    return merged


def recorded_slots(trajectory: Trajectory) -> SlotSet | None:
    """The slots that a layer worked with; None where there was none."""
    slots = trajectory.meta.get("evidence_policy", {}).get("slots")
    if not slots:
        return None
    return SlotSet(tuple(slots["keywords"]), slots["extractor"], slots["model_calls"])
