"""A plan as text."""

from __future__ import annotations

from collections.abc import Sequence

from grpo.arguments import GrpoConfig
from grpo.planning.activations import FLOAT32
from grpo.planning.context import ContextPlan, Rows
from grpo.planning.demand import Demand, gib, rows_at_once, sequences
from grpo.planning.engine import EngineLimits
from grpo.planning.launch import Launch
from grpo.planning.memory import GIB
from grpo.planning.model import Parameters
from grpo.planning.rehearsal import CallLength
from grpo.planning.scene import Material

SHOWN_CALLS = 6
"""Calls shown of a longer episode: the first ones and the last."""


def context_report(
    config: GrpoConfig,
    context: ContextPlan,
    material: Material,
    tokenizer_is_real: bool,
    limits: EngineLimits,
) -> list[str]:
    """Lines on the prompts and on what an engine has to take."""
    episode = config.episode
    window = "all turns" if episode.window is None else f"the last {episode.window} turns"
    lines = [
        "context (tokens of the longest prompt of a call; every reply has "
        f"{config.max_completion_length:,} tokens, the window keeps {window})"
    ]
    if not tokenizer_is_real:
        lines.append("  no tokenizer.json beside config.json: text is counted at 4 characters a token")
    lines += [f"  assumed: {text}" for text in material.assumed]
    lines += _table(_call_rows(context.calls))
    for kind in ("page", "crop"):
        least, most = getattr(context, f"{kind}_budget")
        lines.append(
            f"  a {kind} takes at most {getattr(context, f'{kind}_tokens'):,} image tokens (budget {least:,} "
            f"to {most:,})"
        )
    return [*lines, *_engine_report(config, context, limits)]


def _engine_report(config: GrpoConfig, context: ContextPlan, limits: EngineLimits) -> list[str]:
    reply = config.max_completion_length
    why = (
        "vllm_max_model_length"
        if config.use_vllm and config.vllm_max_model_length
        else (
            f"prompt {context.max_prompt:,} + reply {reply:,}"
            if limits.max_model_len == context.max_context
            else f"of validation; training takes {context.max_context:,}"
        )
    )
    return [
        "engine limits that follow",
        f"  max_model_len {limits.max_model_len:,} ({why})",
        f"  images per prompt {limits.images}",
    ]


def _call_rows(calls: Sequence[CallLength]) -> list[list[str]]:
    shown = list(calls)
    if len(shown) > SHOWN_CALLS:
        shown = [*shown[: SHOWN_CALLS - 1], shown[-1]]
    names = (
        "system",
        "question",
        "evidence",
        "replies",
        "observations",
        "visual",
        "opening",
        "total",
        "images",
    )
    titles = {
        "observations": "observations' text",
        "visual": "image tokens",
        "opening": "opening of the reply",
    }
    rows = [["call", *(str(call.call) for call in shown)]]
    rows += [[titles.get(name, name), *(f"{getattr(call, name):,}" for call in shown)] for name in names]
    return rows


def row_report(
    config: GrpoConfig, context: ContextPlan, turns: int, reply_tokens: int, world: int
) -> list[str]:
    """Lines on the training rows of a step, in both credit modes."""
    trajectories = config.questions_per_step * config.num_generations
    rows = [["credit", "episode", "rows", "tokens", "of images", "longest row", "sampled in it"]]
    for credit in ("trajectory", "turn"):
        for which, by_credit in (("longest", context.worst), ("typical", context.typical)):
            rows.append([_marked(credit, config), which, *_step_cells(by_credit[credit], trajectories)])
    return [
        f"rows and tokens of a step ({config.questions_per_step} questions × {config.num_generations}; a "
        f"typical episode has {turns} calls with replies of {reply_tokens} tokens)",
        *_table(rows),
        f"  {-(-config.questions_per_step // world)} questions a process, {_updates(config, context, world)}",
    ]


def _marked(credit: str, config: GrpoConfig) -> str:
    return f"{credit} (set)" if credit == config.credit else credit


def _step_cells(rows: Rows, trajectories: int) -> list[str]:
    return [
        f"{rows.rows * trajectories:,}",
        f"{rows.tokens * trajectories:,}",
        f"{rows.visual * trajectories:,}",
        f"{rows.longest.tokens:,}",
        f"{rows.longest.sampled:,}",
    ]


def _updates(config: GrpoConfig, context: ContextPlan, world: int) -> str:
    """Optimizer updates of a step on the typical number of rows."""
    if config.gradient_accumulation_steps is None:
        return f"{config.num_iterations} update a step" + ("s" if config.num_iterations > 1 else "")
    rows = -(-config.questions_per_step // world) * config.num_generations
    rows *= context.typical[config.credit].rows
    size = config.per_device_train_batch_size * config.gradient_accumulation_steps
    return f"about {-(-rows // size) * config.num_iterations} updates a step"


def memory_report(
    config: GrpoConfig, parameters: Parameters, demand: Demand, launch: Launch, device: int | None
) -> list[str]:
    """Lines on the memory of one GPU."""
    how = demand.how
    trained = {
        "full": "full fine-tuning",
        "lora": f"LoRA of rank {how.lora_rank}",
        "frozen": "language model frozen",
    }
    weights = "float32" if how.weights == FLOAT32 else "bfloat16"
    settings = [
        f"{weights} weights" + (" computed in bfloat16" if how.autocast else ""),
        trained[how.language],
        f"{how.attention} attention",
        f"gradient checkpointing {'on' if how.checkpointing else 'off'}",
    ]
    notes = {
        "gradients": "updates",
        "communication": "updates",
        "activations": "updates, at most",
        "cache": f"rollouts, {sequences(config, launch)} sequences",
        "sampling": "rollouts, at most",
        "features": "kept, at most",
        "gathered": "rollouts",
        "runtime": "assumed",
        "engine": "rollouts" if config.vllm_enable_sleep_mode else "all the time",
    }
    titles = {
        "cache": "KV cache",
        "features": "image features",
        "gathered": "gathered weights",
        "communication": "communication buffers",
    }
    unit = "GiB" if demand.longest.peak >= 8 * GIB else "MiB"
    rows = [[f"{unit} of one GPU", "longest", "typical", ""]]
    for (name, longest), (_, typical) in zip(demand.longest.lines(), demand.typical.lines()):
        if longest or name in ("reference", "optimizer"):
            rows.append(
                [titles.get(name, name), _cell(longest, unit), _cell(typical, unit), notes.get(name, "")]
            )
    for title in ("update", "rollout", "peak"):
        values = [getattr(memory, title) for memory in (demand.longest, demand.typical)]
        rows.append([f"= {title}", *(_cell(value, unit) for value in values), ""])
    size = "" if device is None else f" with {gib(device)} each"
    return [
        f"memory ({launch.name}{size}; {', '.join(settings)})",
        f"  {parameters.number:,} parameters, {parameters.trained:,} trained",
        f"  rows: longest {demand.longest_row.tokens:,} tokens with {demand.longest_row.sampled:,} sampled, "
        f"typical {demand.typical_row.tokens:,} with {demand.typical_row.sampled:,}; "
        f"{rows_at_once(config, demand.longest_row)} and {rows_at_once(config, demand.typical_row)} a "
        "micro-batch",
        *_table(rows, notes=True),
    ]


def summary(config: GrpoConfig, context: ContextPlan) -> str:
    """One line for the start of a run."""
    rows = context.worst[config.credit].longest
    return (
        f"plan: prompts of at most {context.max_prompt:,} tokens and {context.max_images} images, rows of at "
        f"most {rows.tokens:,} tokens ({config.credit} credit); --plan shows the rest"
    )


def _cell(number: int, unit: str) -> str:
    return f"{number / {'GiB': 1 << 30, 'MiB': 1 << 20}[unit]:,.2f}"


def _table(rows: Sequence[Sequence[str]], notes: bool = False) -> list[str]:
    """Aligned columns: the first to the left, as is a last one of notes, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    left = {0, len(widths) - 1} if notes else {0}
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines
