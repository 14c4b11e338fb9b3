"""Re-run the environment on recorded completions and report every difference, turn by turn.

The agent loop is the real one; the policy is the record. A difference means that code, corpus, index or
settings are no longer what the trajectory was made with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rollout.differences import Difference, compare_trajectories
from rollout.recorded_run import RecordedClient, RecordedRetriever, open_recorded
from visor.env.config import EpisodeConfig
from visor.env.prompts import load_prompts
from visor.models.base import PolicyClient, Sampling
from visor.retrieval.base import Retriever
from visor.systems.run import System
from visor.systems.visor import EvidencePolicyFactory, VisorSystem
from visor.types import PageStore, Question, Trajectory

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


def replay_run(
    run: str | Path, corpus: str | Path | None = None, index: str | Path | None = None, recorded: bool = False
) -> tuple[int, list[Difference]]:
    """Replay every trajectory of a run folder; returns (trajectories replayed, differences).

    See `open_recorded` for the arguments.
    """
    opened = open_recorded(run, corpus, index, recorded)
    count, differences = 0, []
    for trajectory in opened.trajectories():
        make = partial(opened.own_system, trajectory)
        differences += replay_system(trajectory, opened.question(trajectory), make, opened.retriever)
        count += 1
    return count, differences
