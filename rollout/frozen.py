"""Frozen retrieval: the searches of a run are answered with what another run's searches got.

The n-th search of a question gets the candidates of the n-th completed search of the same question in the
recorded run, whatever the query; a search beyond them finds nothing. So every page that can enter the context
is the recorded one, and two runs frozen to the same run differ in the model's behaviour alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from rollout.manifest import read_manifest
from rollout.pressure import neutral_digest
from rollout.results import answered_by_retriever
from rollout.trajectory_file import read_trajectories
from visor.retrieval.base import ScoredPage
from visor.systems.run import System, TurnListener
from visor.types import Question, Trajectory

_waiting: ContextVar[list[list[ScoredPage]]] = ContextVar("searches left of the question being answered")


class FrozenRetriever:
    """The recorded candidates of a run folder, by question and sample. It needs no index."""

    def __init__(self, run: str | Path) -> None:
        """ValueError for a folder that is no run or holds no trajectory."""
        manifest = read_manifest(run)
        self.run = Path(run)
        self.index: dict[str, Any] = manifest.index
        """The recorded run's, with the fingerprint of its retriever."""
        self.corpus_hash: str | None = manifest.corpus.get("hash")
        self.name = manifest.index.get("retriever") or "recorded"
        self._searches: dict[str, dict[int, list[list[ScoredPage]]]] = {}
        for trajectory in read_trajectories(run):
            searches = [
                [ScoredPage(*candidate) for candidate in turn.candidates]
                for turn in trajectory.turns
                if answered_by_retriever(turn)
            ]
            self._searches.setdefault(trajectory.question_id, {})[trajectory.sample_index] = searches

    @property
    def digest(self) -> str:
        """SHA-256 over questions, samples and ranked pages, 16 hex digits."""
        record = [
            [question, sample, [[[hit.page_id, hit.score] for hit in hits] for hits in searches]]
            for question, samples in sorted(self._searches.items())
            for sample, searches in sorted(samples.items())
        ]
        return hashlib.sha256(json.dumps(record).encode()).hexdigest()[:16]

    def check(self, questions: Collection[str], corpus_hash: str) -> None:
        """ValueError when a question is not in the record, or when that is of another corpus."""
        if self.corpus_hash not in (None, corpus_hash):
            raise ValueError(f"{self.run} was made on another corpus; retrieval cannot be frozen to it")
        missing = [question for question in questions if question not in self._searches]
        if missing:
            raise ValueError(
                f"{self.run} has no trajectory of {len(missing)} of the {len(questions)} questions, such as "
                f"{missing[0]}; freeze retrieval to a run over all of them"
            )

    def start(self, question_id: str, sample_index: int) -> None:
        """The searches of this task are from now on those of the question. A sample that was not recorded
        takes those of the first sample that was."""
        samples = self._searches[question_id]
        searches = samples.get(sample_index, samples[min(samples)])
        _waiting.set(list(searches))

    def search(self, query: str, k: int) -> list[ScoredPage]:
        """The next recorded candidates, the best `k` of them."""
        waiting = _waiting.get()
        return waiting.pop(0)[:k] if waiting else []


class IntervenedSystem:
    """A system under an intervention, which stands on each trajectory as `meta.intervention`."""

    def __init__(self, system: System, record: dict[str, Any], frozen: FrozenRetriever | None) -> None:
        self.name = system.name
        self._system = system
        self._record = record | ({"frozen": record["frozen"]["searches"]} if "frozen" in record else {})
        self._frozen = frozen

    async def solve(
        self,
        question: Question,
        *,
        seed: int = 0,
        sample_index: int = 0,
        on_turn: TurnListener | None = None,
    ) -> Trajectory:
        if self._frozen is not None:
            self._frozen.start(question.question_id, sample_index)
        trajectory = await self._system.solve(question, seed=seed, sample_index=sample_index, on_turn=on_turn)
        trajectory.meta["intervention"] = dict(self._record)
        return trajectory


def describe_intervention(tokens: int, frozen: FrozenRetriever | None) -> dict[str, Any]:
    """The manifest's `intervention` field; {} = none."""
    record: dict[str, Any] = {}
    if tokens:
        record = {"pressure_tokens": tokens, "neutral_text": neutral_digest(tokens)}
    if frozen is not None:
        record["frozen"] = {"path": str(frozen.run.resolve()), "searches": frozen.digest}
    return record
