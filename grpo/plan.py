"""`python -m grpo.train … --plan`: what a run's settings lead to, before anything runs.

`plan` prints the longest context by part, the engine limits that follow, rows and tokens of a step in each
credit mode, and the memory of one GPU, and says which limits are exceeded. `check_limits` is the part of it
that every run starts with.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data.corpus import Corpus
from data.questions import load_questions
from grpo.arguments import GrpoConfig
from grpo.planning.context import ContextPlan, plan_context
from grpo.planning.demand import Demand, device_bytes, gpu_demand, memory_findings
from grpo.planning.engine import EngineLimits, engine_limits
from grpo.planning.launch import Launch, find_launch
from grpo.planning.limits import Finding, limit_findings
from grpo.planning.model import Parameters, count_parameters, read_model_config, read_tokenizer
from grpo.planning.options import PlanOptions
from grpo.planning.report import context_report, memory_report, row_report, summary
from grpo.planning.scene import Material, gather
from grpo.planning.wording import counting_renderer, stand_in_tokenizer
from visor.models.precision import DeviceFacts, device_facts, with_device_defaults
from visor.types import Page, Question

REFUSED = 2
"""Exit status of a plan that exceeds a limit."""


@dataclass
class Plan:
    """Everything that is known of a run before it starts."""

    config: GrpoConfig
    launch: Launch
    context: ContextPlan
    limits: EngineLimits
    material: Material
    tokenizer_is_real: bool
    parameters: Parameters
    demand: Demand
    device: int | None
    """Memory of a GPU in bytes; None: not known."""
    turns: int
    reply_tokens: int
    findings: list[Finding]

    @property
    def refusals(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind != "warning"]

    def lines(self) -> list[str]:
        """The plan as text."""
        config, context, world = self.config, self.context, self.launch.world_size
        lines = [
            f"plan of a GRPO run from {config.model_name_or_path}",
            *context_report(config, context, self.material, self.tokenizer_is_real, self.limits),
            *row_report(config, context, self.turns, self.reply_tokens, world),
            *memory_report(config, self.parameters, self.demand, self.launch, self.device),
        ]
        return [*lines, *map(str, self.findings), "refused" if self.refusals else "no limit is exceeded"]


def make_plan(config: GrpoConfig, options: PlanOptions) -> Plan:
    """Plan a run. ValueError for what cannot be planned: no model configuration, a damaged corpus."""
    launch = find_launch(
        options.plan_launch_file, options.plan_world_size, options.plan_zero_stage, options.plan_fsdp
    )
    model_config = read_model_config(config.model_name_or_path)
    config = with_device_defaults(config, planned_device(launch.is_deepspeed))
    tokenizer = read_tokenizer(config.model_name_or_path)
    turns = min(options.plan_turns, config.episode.max_turns)
    reply_tokens = min(options.plan_reply_tokens, config.max_completion_length)
    pages, questions = _material(config)
    context, material = _context(
        config, model_config, tokenizer or stand_in_tokenizer(), pages, questions, turns, reply_tokens
    )
    parameters = count_parameters(config, model_config)
    device = device_bytes(options)
    demand = gpu_demand(config, model_config, parameters, context, launch, reply_tokens, device)
    findings = limit_findings(config, model_config, context, material, options.plan_must_fit)
    findings += memory_findings(config, demand, launch, device, options.plan_must_fit)
    return Plan(
        config=config,
        launch=launch,
        context=context,
        limits=plan_engine(config, tokenizer or stand_in_tokenizer(), context, _held_out(config)),
        material=material,
        tokenizer_is_real=tokenizer is not None,
        parameters=parameters,
        demand=demand,
        device=device,
        turns=turns,
        reply_tokens=reply_tokens,
        findings=findings,
    )


def planned_device(deepspeed: bool) -> DeviceFacts:
    """The device of the plan, which is a GPU: the one that is here, else one that computes in bfloat16."""
    here = device_facts()
    facts = here if here.kind != "cpu" else DeviceFacts("cuda", bf16=True)
    return replace(facts, master_weights=deepspeed)


def plan(config: GrpoConfig, options: PlanOptions) -> int:
    """Print the plan, once for all processes of a launch; returns the exit status, 2 when it is refused."""
    made = make_plan(config, options)
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(made.lines()), flush=True)
    return REFUSED if made.refusals else 0


def check_limits(
    config: GrpoConfig,
    tokenizer,
    pages: Sequence[Page],
    questions: Sequence[Question],
    options: PlanOptions | None = None,
    *,
    quiet: bool = False,
) -> ContextPlan:
    """What every run starts with: the same checks without the memory, in one line and one more a warning.

    ValueError for a limit that such a run cannot keep; limits that only cost rows or replies are warnings.
    """
    options = options or PlanOptions()
    model_config = read_model_config(config.model_name_or_path, download=True)
    turns = min(options.plan_turns, config.episode.max_turns)
    reply_tokens = min(options.plan_reply_tokens, config.max_completion_length)
    context, material = _context(config, model_config, tokenizer, pages, questions, turns, reply_tokens)
    findings = limit_findings(config, model_config, context, material)
    impossible = [finding.text for finding in findings if finding.kind == "always"]
    if impossible:
        raise ValueError("; ".join(impossible))
    if not quiet:
        print(summary(config, context), flush=True)
        for finding in findings:
            print(f"warning: {finding.text}", file=sys.stderr, flush=True)
    return context


def plan_engine(
    config: GrpoConfig,
    tokenizer,
    context: ContextPlan,
    held_out: tuple[Sequence[Page], Sequence[Question]] | None,
) -> EngineLimits:
    """The limits of an engine for training contexts of `context` and for the pages and questions of
    validation, None without one."""
    model_config = read_model_config(config.model_name_or_path)
    contexts = [context]
    if held_out is not None:
        contexts.append(
            _context(config, model_config, tokenizer, *held_out, 1, config.max_completion_length)[0]
        )
    return engine_limits(config, contexts, model_config.text_config.max_position_embeddings)


def _held_out(config: GrpoConfig) -> tuple[list[Page], list[Question]] | None:
    """Pages and questions of validation, None without one or where they do not exist yet."""
    folder, questions = config.eval_corpus or config.corpus, config.eval_questions
    if config.eval_steps is None or questions is None or not Path(folder).exists():
        return None
    if not Path(questions.partition(":")[2]).is_file():
        return None
    corpus = Corpus.open(folder)
    return corpus.pages(), load_questions(questions, corpus, [])[: config.eval_limit]


def _context(
    config: GrpoConfig,
    model_config: Any,
    tokenizer,
    pages: Sequence[Page] | None,
    questions: Sequence[Question] | None,
    turns: int,
    reply_tokens: int,
) -> tuple[ContextPlan, Material]:
    renderer = counting_renderer(tokenizer, model_config.vision_config)
    material = gather(renderer, config.episode, pages, questions)
    return plan_context(config, renderer, material, turns, reply_tokens), material


def _material(config: GrpoConfig) -> tuple[list[Page] | None, list[Question] | None]:
    """Pages and questions of the run, None where they do not exist yet."""
    corpus = Corpus.open(config.corpus) if Path(config.corpus).exists() else None
    path = config.questions.partition(":")[2]
    questions = load_questions(config.questions, corpus, []) if Path(path).is_file() else None
    return (corpus.pages() if corpus else None), questions
