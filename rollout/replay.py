"""Re-run the environment on recorded completions and report every difference, turn by turn.

The agent loop is the real one; the policy is the record. A difference means that code, corpus, index or
settings are no longer what the trajectory was made with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data.corpus import Corpus
from rollout.build import AgentConfig, make_system
from rollout.layers import layer_config
from rollout.manifest import read_manifest
from rollout.recorder import read_lines
from rollout.run_folder import TRAJECTORIES_NAME
from visor.env.config import EpisodeConfig
from visor.env.prompts import load_prompts
from visor.models.base import ContextTooLong, PolicyClient, Request, Sampling, TooManyImages
from visor.retrieval.base import Retriever, ScoredPage
from visor.retrieval.index import open_index
from visor.systems.run import System
from visor.systems.visor import EvidencePolicyFactory, VisorSystem
from visor.types import (
    Completion,
    PageStore,
    Question,
    Record,
    Search,
    StopReason,
    Trajectory,
    Turn,
    messages_digest,
)

TURN_FIELDS = (
    "think",
    "action",
    "format_ok",
    "flags",
    "is_verification",
    "query",
    "candidates",
    "observation",
)


class Difference(Record):
    """Where a replayed trajectory leaves its record."""

    trajectory: str
    """`question_id/sample_index`."""
    turn: int | None
    """0-based; None = about the trajectory as a whole."""
    field: str
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        place = self.trajectory if self.turn is None else f"{self.trajectory} turn {self.turn + 1}"
        return f"{place}: {self.field}: recorded {_short(self.recorded)}, now {_short(self.replayed)}"


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


MakeSystem = Callable[[PolicyClient, Retriever], System]


def replay_system(
    trajectory: Trajectory, question: Question, make: MakeSystem, retriever: Retriever | None = None
) -> list[Difference]:
    """Replay one trajectory with the system that `make` builds around a client and a retriever.

    An empty list = not a byte of the environment's part has changed. Without a retriever the recorded
    candidates are used. Times are not compared, and neither is a fault of the environment or the policy,
    which no replay can bring back.
    """
    system = make(RecordedClient(trajectory), retriever or RecordedRetriever(trajectory))
    solve = system.solve(question, seed=trajectory.seed, sample_index=trajectory.sample_index)
    return compare_trajectories(trajectory, asyncio.run(solve))


def replay(
    trajectory: Trajectory,
    question: Question,
    store: PageStore,
    config: EpisodeConfig,
    retriever: Retriever | None = None,
    policies: EvidencePolicyFactory | None = None,
) -> list[Difference]:
    """`replay_system` of a trajectory of the VISOR agent."""
    prompts = load_prompts(config.prompts)

    def make(client: PolicyClient, candidates: Retriever) -> System:
        return VisorSystem(client, candidates, store, config, prompts, Sampling(), policies)

    return replay_system(trajectory, question, make, retriever)


def compare_trajectories(recorded: Trajectory, replayed: Trajectory) -> list[Difference]:
    """Name every difference that the environment is answerable for."""
    name = f"{recorded.question_id}/{recorded.sample_index}"
    found = [
        Difference(trajectory=name, turn=old.index, field=field, recorded=before, replayed=after)
        for old, new in zip(recorded.turns, replayed.turns, strict=False)
        for field, before, after in _turn_differences(old, new)
    ]
    whole: dict[str, tuple[Any, Any]] = {"prompt": (_digest(recorded.prompt), _digest(replayed.prompt))}
    if recorded.error is None:
        whole |= {
            "turns": (len(recorded.turns), len(replayed.turns)),
            "answer": (recorded.answer, replayed.answer),
            "stop_reason": (recorded.stop_reason, replayed.stop_reason),
        }
    for field, (before, after) in whole.items():
        if before != after:
            found.append(Difference(trajectory=name, turn=None, field=field, recorded=before, replayed=after))
    return found


def replay_run(
    run: str | Path, corpus: str | Path | None = None, index: str | Path | None = None, recorded: bool = False
) -> tuple[int, list[Difference]]:
    """Replay every trajectory of a run folder; returns (trajectories replayed, differences).

    Corpus, index, system and layer are the manifest's unless another `corpus` or `index` is given; another
    corpus comes with its own index, `CORPUS/index/RETRIEVER`, where none is named. `recorded` takes the
    candidates from the record and needs no index. ValueError when the folder is no run, or its layer asks a
    model for slots, which a replay does not.
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
    # The candidates of frozen retrieval follow from another run, and no index gives them.
    recorded = recorded or "frozen" in manifest.intervention
    retriever = None if recorded else open_index(config.index_path, store, config.retriever)
    layer = layer_config(config)
    if layer is not None and layer.slot_extractor == "model":
        raise ValueError("the TAEC slots of this run come from a model, which a replay does not ask")

    def make(client: PolicyClient, candidates: Retriever) -> System:
        return make_system(config, store, candidates, client)

    questions = {row["question_id"]: row for row in read_lines(Path(run) / "results.jsonl")}
    count, differences = 0, []
    for record in read_lines(Path(run) / TRAJECTORIES_NAME):
        trajectory = Trajectory.model_validate(record)
        row = questions.get(trajectory.question_id, {})
        question = Question(
            question_id=trajectory.question_id, text=trajectory.question, tags=row.get("tags", {})
        )
        differences += replay_system(trajectory, question, make, retriever)
        count += 1
    return count, differences


def _turn_differences(old: Turn, new: Turn) -> list[tuple[str, Any, Any]]:
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    found = [(f, before[f], after[f]) for f in TURN_FIELDS if before[f] != after[f]]
    contexts = _digest(old.context), _digest(new.context)
    return ([("context", *contexts)] if contexts[0] != contexts[1] else []) + found


def _digest(messages: Sequence) -> str:
    return messages_digest(list(messages))[:16]


def _short(value: Any, limit: int = 160) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
