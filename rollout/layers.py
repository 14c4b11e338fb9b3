"""The TAEC layer of a configuration: its settings as they run, and what makes it for each question."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from visor.models.base import PolicyClient
from visor.systems.registry import check_layer, plain_graph_policy
from visor.systems.visor import EvidencePolicyFactory
from visor.taec.captions import Captions
from visor.taec.config import TaecConfig
from visor.taec.graph_policy import make_graph_policy
from visor.taec.policy import make_evidence_policy, switched
from visor.taec.requirements import ModelSlotExtractor, SlotSet
from visor.types import PageStore, Question

if TYPE_CHECKING:
    from rollout.build import AgentConfig
    from visor.env.graph import GraphPolicy
    from visor.env.policy import EvidencePolicy
    from visor.systems.dag import GraphPolicyFactory


def layer_config(config: AgentConfig) -> TaecConfig | None:
    """The settings of the TAEC layer as it runs, None when it is off; ValueError over another system."""
    active = switched(config.taec, config.taec_config)
    if active is None:
        return None
    check_layer(config.system)
    return active.for_dag() if config.system == "dag" and config.taec.strip().lower() == "on" else active


def evidence_policy_factory(
    config: AgentConfig, corpus: PageStore, client: PolicyClient | None
) -> EvidencePolicyFactory | None:
    """What makes the TAEC layer over a VISOR policy for each question; None when it is off.

    `client` is asked for the slots when the layer's slot extractor is a model; ValueError without one.
    """
    active = layer_config(config)
    if active is None:
        return None
    captions = Captions(corpus)

    def make(question: Question, slots: SlotSet | None) -> EvidencePolicy | None:
        return make_evidence_policy("on", active, question, corpus, slots, captions)

    return _with_slots(active, client, make)


def graph_policy_factory(
    config: AgentConfig, corpus: PageStore, client: PolicyClient | None
) -> GraphPolicyFactory:
    """What makes the TAEC layer over the DAG agent for each question; the plain agent's policy when off."""
    active = layer_config(config)
    plain = plain_graph_policy(config.loop)
    captions = Captions(corpus)

    def make(question: Question, slots: SlotSet | None) -> GraphPolicy:
        return make_graph_policy(active, question.text, captions, plain, slots)

    return _with_slots(active, client, make)


def _with_slots(
    active: TaecConfig | None, client: PolicyClient | None, make: Callable[[Question, SlotSet | None], Any]
) -> Callable[[Question], Any]:
    """`make` with the question's slots, which a model is asked for where the layer says so."""
    if active is None or active.slot_extractor == "rules":
        return lambda question: make(question, None)
    if client is None:
        raise ValueError("the TAEC slots come from a model, and there is none here")
    extractor = ModelSlotExtractor(client, active.max_slots)

    async def with_model_slots(question: Question) -> Any:
        return make(question, await extractor.extract(question.text))

    return with_model_slots
