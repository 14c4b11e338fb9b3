"""The systems by name, and what each is built from. A new one is a file beside this one and an entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from visor.env.config import EpisodeConfig
from visor.env.graph import PlainGraphPolicy
from visor.env.prompts import load_prompts
from visor.models.base import PolicyClient, Sampling
from visor.retrieval.base import Retriever
from visor.systems.config import LoopConfig
from visor.systems.dag import DagSystem, GraphPolicyFactory
from visor.systems.prompts import DagPrompts, ReactPrompts, VanillaPrompts, load_system_prompts
from visor.systems.react import ReactSystem
from visor.systems.run import System
from visor.systems.vanilla import VanillaSystem
from visor.systems.visor import EvidencePolicyFactory, VisorSystem
from visor.types import PageStore


@dataclass(frozen=True)
class SystemParts:
    """What a system may be built from; each takes what it needs."""

    client: PolicyClient
    retriever: Retriever
    store: PageStore
    sampling: Sampling
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    """visor."""
    loop: LoopConfig = field(default_factory=LoopConfig)
    """vanilla, react and dag."""
    evidence_policies: EvidencePolicyFactory | None = None
    """visor under a layer; None = the plain agent."""
    graph_policies: GraphPolicyFactory | None = None
    """dag under a layer; None = the plain agent."""


def _visor(parts: SystemParts) -> System:
    return VisorSystem(
        parts.client,
        parts.retriever,
        parts.store,
        parts.episode,
        load_prompts(parts.episode.prompts),
        parts.sampling,
        parts.evidence_policies,
    )


def _vanilla(parts: SystemParts) -> System:
    prompts = load_system_prompts(VanillaPrompts, "vanilla", parts.loop.prompts)
    return VanillaSystem(parts.client, parts.retriever, parts.loop, prompts, parts.sampling)


def _react(parts: SystemParts) -> System:
    prompts = load_system_prompts(ReactPrompts, "react", parts.loop.prompts)
    return ReactSystem(parts.client, parts.retriever, parts.store, parts.loop, prompts, parts.sampling)


def _dag(parts: SystemParts) -> System:
    prompts = load_system_prompts(DagPrompts, "dag", parts.loop.prompts)
    plain = plain_graph_policy(parts.loop)
    policies = parts.graph_policies or (lambda question: plain)
    return DagSystem(parts.client, parts.retriever, parts.loop, prompts, parts.sampling, policies)


def plain_graph_policy(loop: LoopConfig) -> PlainGraphPolicy:
    """The plain DAG agent's policy; it keeps nothing of a question, so one serves all."""
    return PlainGraphPolicy(
        loop.memory_images,
        loop.memory_pixels,
        loop.page_min_pixels,
        loop.page_max_pixels,
        loop.memory_pressure_onset_tokens,
    )


SYSTEMS: dict[str, Callable[[SystemParts], System]] = {
    "visor": _visor,
    "vanilla": _vanilla,
    "react": _react,
    "dag": _dag,
}
LAYERED = {"visor", "dag"}
"""Systems that a TAEC layer can stand over."""


def check_system(name: str) -> str:
    """The name back; ValueError naming the known ones for any other."""
    if name not in SYSTEMS:
        raise ValueError(f"unknown system {name!r}; known: {', '.join(sorted(SYSTEMS))}")
    return name


def check_layer(name: str) -> None:
    """ValueError when no TAEC layer can stand over the system."""
    if name not in LAYERED:
        raise ValueError(f"TAEC stands over visor and dag, not over {name}; set taec to off")


def build_system(name: str, parts: SystemParts) -> System:
    """The system of a name. ValueError for an unknown one, and for prompts that are not there."""
    return SYSTEMS[check_system(name)](parts)
