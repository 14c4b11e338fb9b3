"""Configuration → agent: the corpus, its index, the policy client, the layer and the system around them."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from data.corpus import Corpus
from rewards.extraction import ExtractingScorer
from rewards.judge import Judge, ModelJudge, RuleJudge
from rewards.judge_cache import JudgeCache
from rewards.scorers import SCORERS
from rollout.fingerprints import (
    checkpoint_fingerprint,
    code_fingerprint,
    corpus_fingerprints,
    file_fingerprint,
    retriever_fingerprint,
)
from rollout.frozen import FrozenRetriever
from rollout.layers import evidence_policy_factory, graph_policy_factory, layer_config
from rollout.manifest import RunManifest, environment_fields
from visor.config import Config
from visor.env.config import EpisodeConfig
from visor.env.crop import ImageCutter
from visor.models.base import ImageSource, PolicyClient, Sampling
from visor.models.loading import SPEC_FORMS, make_client, parse_model_spec
from visor.models.sampling_engine import EngineFailed
from visor.retrieval.base import Retriever
from visor.retrieval.index import index_path, open_index
from visor.retrieval.opening import resolved
from visor.systems.config import LoopConfig
from visor.systems.registry import SystemParts, build_system, check_system
from visor.systems.run import System
from visor.taec.config import TaecConfig
from visor.types import PageStore, Question


class AgentConfig(Config):
    """What answers a question."""

    system: str = "visor"
    """visor, vanilla, react or dag."""
    model: str | None = None
    """hf:PATH, vllm:PATH, openai:NAME@URL or script:FILE."""
    checkpoint: str | None = None
    """A checkpoint folder; short for `--model hf:PATH`."""
    corpus: str
    """Corpus folder."""
    index: str | None = None
    """Index folder of that corpus, or the address of a service, http://HOST:PORT or peer+http://HOST:PORT;
    null = CORPUS/index/RETRIEVER."""
    retriever: str | None = None
    """bm25, dense, colqwen or hybrid:FIRST+SECOND; null = bm25, or the one behind `index`."""
    taec: str = "off"
    """The TAEC layer: on, off, or the operators to turn on alone (A, M, V, AM, …)."""
    taec_config: TaecConfig = Field(default_factory=TaecConfig)
    episode: EpisodeConfig = Field(default_factory=EpisodeConfig)
    """Of the system visor."""
    loop: LoopConfig = Field(default_factory=LoopConfig)
    """Of the systems vanilla, react and dag."""
    temperature: float = Field(0.1, ge=0)
    """0 = greedy. 0.1 is what VISOR's public code evaluates with."""
    top_p: float = Field(1.0, gt=0, le=1)
    max_new_tokens: int = Field(2048, ge=1)
    """Of one reply."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str | None = None
    attn_implementation: str | None = None
    max_context: int | None = None
    """Tokens of prompt and reply that the model takes; a longer request ends the episode."""
    max_images: int | None = None
    """Images that a request may hold."""
    jpeg_quality: int = Field(95, ge=1, le=95)
    """Of the pictures sent to an endpoint."""
    max_image_bytes: int | None = Field(None, ge=1000)
    """A picture of more JPEG bytes than this is sent smaller; null = no limit."""
    batch_size: int = Field(64, ge=1)
    """Requests that a local model answers in one batch."""
    torch_threads: int | None = Field(None, ge=1)
    """CPU threads of PyTorch; null = its own choice."""

    @field_validator("taec", mode="before")
    @classmethod
    def _yaml_switch(cls, value: object) -> object:
        """YAML reads a bare `on` or `off` as a truth value."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    @field_validator("system")
    @classmethod
    def _known_system(cls, value: str) -> str:
        return check_system(value)

    @property
    def model_spec(self) -> str:
        """The model under its one name; ValueError unless exactly one of model and checkpoint is set."""
        if (self.model is None) == (self.checkpoint is None):
            raise ValueError(
                "name the policy with either --model hf:PATH|openai:NAME@URL|… or --checkpoint PATH"
            )
        return self.model or f"hf:{self.checkpoint}"

    @property
    def index_path(self) -> str | Path:
        """A folder, or the address of a service as it was given."""
        return index_path(self.corpus, self.index, self.retriever)


@dataclass
class Agent:
    """A system that is ready to answer, and what it is made of."""

    system: System
    client: PolicyClient
    corpus: Corpus
    retriever: Retriever


def build_agent(
    config: AgentConfig, client: PolicyClient | None = None, retriever: Retriever | None = None
) -> Agent:
    """Open the corpus and its index, load the model, and put the system together.

    `client` and `retriever` stand in for the configured model and index. ValueError for anything missing or
    unusable.
    """
    corpus = Corpus.open(config.corpus)
    corpus.check_images()
    if retriever is None:
        retriever = open_index(config.index_path, corpus, config.retriever)
    if client is None:
        client = build_client(config, corpus)
    system = make_system(config, corpus, retriever, client)
    return Agent(system, client, corpus, retriever)


def make_system(
    config: AgentConfig,
    corpus: PageStore,
    retriever: Retriever,
    client: PolicyClient,
    slots_client: PolicyClient | None = None,
) -> System:
    """The configured system around its parts, under the TAEC layer where that is on.

    `slots_client`: what the layer asks for slots; None = the policy's client.
    """
    asked = slots_client or client
    sampling = Sampling(temperature=config.temperature, top_p=config.top_p, max_tokens=config.max_new_tokens)
    parts = SystemParts(client, retriever, corpus, sampling, config.episode, config.loop)
    if layer_config(config) is None:
        return build_system(config.system, parts)
    if config.system == "dag":
        parts = replace(parts, graph_policies=graph_policy_factory(config, corpus, asked))
    else:
        parts = replace(parts, evidence_policies=evidence_policy_factory(config, corpus, asked))
    return build_system(config.system, parts)


def build_client(config: AgentConfig, corpus: PageStore) -> PolicyClient:
    """The policy client; sets PyTorch's threads first where they are configured."""
    spec = config.model_spec
    if config.torch_threads is not None:
        import torch

        torch.set_num_threads(config.torch_threads)
    try:
        return make_client(
            spec,
            images=ImageCutter(corpus),
            dtype=config.dtype,
            device=config.device,
            attn_implementation=config.attn_implementation,
            max_context=config.max_context,
            max_images=config.max_images,
            batch_size=config.batch_size,
            openai_args={"jpeg_quality": config.jpeg_quality, "max_image_bytes": config.max_image_bytes},
        )
    except EngineFailed as error:  # a server that does not answer
        raise ValueError(str(error)) from error


def describe_model(spec: str) -> dict[str, Any]:
    """What identifies the model, for the manifest; a moved checkpoint stays the same model."""
    parsed = parse_model_spec(spec)
    if parsed.kind == "openai":
        return {"kind": "openai", "name": parsed.target, "url": parsed.url}
    fingerprint: Callable[[str], str] = (
        file_fingerprint if parsed.kind == "script" else checkpoint_fingerprint
    )
    return {"kind": parsed.kind, "path": parsed.target, "fingerprint": fingerprint(parsed.target)}


def describe_data(config: AgentConfig, agent: Agent) -> dict[str, dict[str, Any]]:
    """The manifest's `corpus` and `index` fields."""
    corpus = {"path": str(Path(config.corpus).resolve()), **corpus_fingerprints(agent.corpus)}
    if isinstance(agent.retriever, FrozenRetriever):
        return {"corpus": corpus, "index": agent.retriever.index}
    index = {
        "path": resolved(config.index_path),
        "retriever": agent.retriever.name,
        "retriever_fingerprint": retriever_fingerprint(agent.retriever),
    }
    return {"corpus": corpus, "index": index}


def agent_manifest(
    config: AgentConfig,
    agent: Agent,
    model: dict[str, Any],
    questions: Sequence[Question],
    judge: str,
    *,
    benchmark: str,
    seed: int,
) -> RunManifest:
    """What a run of `agent` over `questions`, read as `benchmark`, is made with; `model` is described."""
    data = describe_data(config, agent)
    active = layer_config(config)
    digest = hashlib.sha256("\n".join(q.model_dump_json() for q in questions).encode()).hexdigest()
    return RunManifest(
        **environment_fields(),
        command=sys.argv,
        code_fingerprint=code_fingerprint(),
        arguments=config.model_dump(mode="json"),
        system=config.system,
        model=model,
        corpus=data["corpus"],
        index=data["index"],
        questions={"path": benchmark, "hash": digest, "n": len(questions)},
        judge=judge,
        episode=(config.episode if config.system == "visor" else config.loop).model_dump(mode="json"),
        taec=active.model_dump(mode="json") | {"operators": active.operators} if active else {},
        sampling=describe_sampling(config),
        seed=seed,
    )


def describe_sampling(config: AgentConfig) -> dict[str, Any]:
    """The manifest's `sampling` field; how pictures are sent is named where it is not the usual way."""
    usual = ("temperature", "top_p", "max_new_tokens")
    sent = [n for n in ("jpeg_quality", "max_image_bytes") if getattr(config, n) != _default(n)]
    return {name: getattr(config, name) for name in (*usual, *sent)}


def _default(name: str) -> Any:
    return AgentConfig.model_fields[name].default


class JudgeOptions(Config):
    """How a model is asked as the judge; without effect on judges without a model."""

    scale: Literal[2, 5] = 2
    """2: right or wrong. 5: a grade from 1 to 5, right from 4 on."""
    extractor: str | None = None
    """For the judges mmlongbench and slidevqa: the spec of a model that makes answers short before they are
    scored; null: they are scored as they are."""
    cache: str | None = None
    """JSON-lines file of verdicts and short answers, shared by runs and processes; null: none are kept."""
    honesty: Literal["rule", "model"] = "rule"
    """Who says whether an answer after incomplete retrieval is honest: the list of phrases, or the model."""
    prompts: str | None = None
    """YAML file of judge prompts; null: the shipped ones."""
    attempts: int = Field(3, ge=1)
    """Replies without a verdict until the judge counts as failed."""
    max_concurrency: int = Field(32, ge=1)
    """Calls at once, of each process."""
    max_tokens: int = Field(1024, ge=1)
    """Of a reply."""
    timeout: float = Field(600.0, gt=0)
    """Seconds an endpoint may take for one reply."""
    max_retries: int = Field(5, ge=0)
    """Of a call that an endpoint fails to answer (connection, time-out, 408, 409, 429, 5xx), with growing
    waits; other refusals are final."""


def make_judge(name: str, images: ImageSource | None = None, options: JudgeOptions | None = None) -> Judge:
    """The judge of a name: `rule`, `mmlongbench`, `slidevqa`, or a model spec, whose model is asked
    (`images`: for its client). ValueError for any other name."""
    options = options or JudgeOptions()
    if options.extractor is not None and name not in SCORERS:
        raise ValueError(f"judge_options.extractor is for {' and '.join(SCORERS)}, not for the judge {name}")
    if name == RuleJudge.name:
        return RuleJudge()
    if name in SCORERS:
        return _make_scorer(name, options)
    if ":" not in name:
        known = ", ".join((RuleJudge.name, *SCORERS))
        raise ValueError(f"unknown judge {name!r}; known: {known}, or a model: {SPEC_FORMS}")
    client = make_client(name, images=images, timeout=options.timeout, max_retries=options.max_retries)
    return ModelJudge(
        client,
        prompts=Path(options.prompts) if options.prompts else None,
        honesty=options.honesty,
        scale=options.scale,
        attempts=options.attempts,
        max_tokens=options.max_tokens,
        max_concurrency=options.max_concurrency,
        cache=JudgeCache(options.cache) if options.cache else None,
        identity=_judge_identity(name) if options.cache else None,
    )


def _make_scorer(name: str, options: JudgeOptions) -> Judge:
    scorer = SCORERS[name]()
    if options.extractor is None:
        return scorer
    return ExtractingScorer(
        scorer,
        make_client(options.extractor, timeout=options.timeout, max_retries=options.max_retries),
        prompts=Path(options.prompts) if options.prompts else None,
        attempts=options.attempts,
        max_tokens=options.max_tokens,
        max_concurrency=options.max_concurrency,
        cache=JudgeCache(options.cache) if options.cache else None,
        identity=_judge_identity(options.extractor) if options.cache else None,
    )


def _judge_identity(spec: str) -> str:
    """Which model judges, for the cache: a local one by its files, one at an endpoint by its name there, on
    whichever host it is served."""
    described = describe_model(spec)
    return f"{described['kind']}:{described.get('name') or described['fingerprint']}"
