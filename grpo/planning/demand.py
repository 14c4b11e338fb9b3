"""What a plan asks of one GPU: batches of the longest and of the typical rows, and the memory they take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from grpo.arguments import GrpoConfig
from grpo.planning.activations import Batch, Mode, Pass, Shape, peak
from grpo.planning.context import ContextPlan, RowLength
from grpo.planning.launch import Launch
from grpo.planning.limits import Finding
from grpo.planning.memory import GIB, Memory, RolloutBatch, estimate
from grpo.planning.model import Parameters, adapter_folder, adapter_rank, weight_type
from grpo.planning.options import PlanOptions
from visor.models.lora import one_base_suffices

TIGHT = 0.92
"""Share of a GPU's memory above which the allocator's gaps may already be too much."""


@dataclass(frozen=True)
class Demand:
    """Memory of one GPU in the longest and in the typical case."""

    longest: Memory
    typical: Memory
    longest_row: RowLength
    typical_row: RowLength
    how: Pass
    bytes_a_sampled_token: int
    """By which the activations of the longest row grow with it."""


def gpu_demand(
    config: GrpoConfig,
    model_config: Any,
    parameters: Parameters,
    context: ContextPlan,
    launch: Launch,
    reply_tokens: int,
    device: int | None = None,
) -> Demand:
    """Estimate both cases. Rows are those that are trained: a longer one than `max_length` is cut.
    `reply_tokens` are those of a typical reply, `device` the bytes of a GPU, of which a colocated engine
    takes its share."""
    bf16 = bool(config.bf16) or launch.bf16
    shape, how = Shape.of(model_config), compute_pass(config, model_config, launch, bf16)
    longest = _cut(context.worst[config.credit].longest, config.max_length)
    typical = _cut(context.typical[config.credit].longest, config.max_length)
    widest = max(context.calls, key=lambda call: call.visual)
    fullest = max(context.typical_calls, key=lambda call: call.total)

    def memory(row: RowLength, prompt: int, reply: int, visual: int) -> Memory:
        needed = estimate(
            shape,
            how,
            parameters,
            launch,
            _batch(config, row, max(context.page_tokens, context.crop_tokens)),
            RolloutBatch(sequences(config, launch), prompt, reply, visual),
            bf16=bf16,
            reference=reference_bytes(config, model_config, parameters),
        )
        return with_engine(needed, config, device)

    return Demand(
        longest=memory(
            longest,
            context.max_prompt,
            config.max_completion_length,
            min(widest.visual, context.max_prompt),
        ),
        typical=memory(typical, min(fullest.total, context.max_prompt), reply_tokens, fullest.visual),
        longest_row=longest,
        typical_row=typical,
        how=how,
        bytes_a_sampled_token=_slope(
            config, shape, how, longest, max(context.page_tokens, context.crop_tokens)
        ),
    )


def with_engine(needed: Memory, config: GrpoConfig, device: int | None) -> Memory:
    """The memory of a GPU where an engine samples: nothing of the trainer's own sampling, and the share of a
    colocated one."""
    if not config.use_vllm:
        return needed
    share = 0
    if config.vllm_mode == "colocate" and device is not None:
        share = round(config.vllm_gpu_memory_utilization * device)
    return replace(
        needed,
        cache=0,
        sampling=0,
        engine=share,
        engine_update=0 if config.vllm_enable_sleep_mode else share,
    )


def _slope(config: GrpoConfig, shape: Shape, how: Pass, row: RowLength, largest_image: int) -> int:
    shorter = RowLength(row.tokens - 1, row.visual, row.sampled - 1)
    longer, less = (peak(shape, how, _batch(config, each, largest_image)) for each in (row, shorter))
    return max(1, longer - less)


def compute_pass(config: GrpoConfig, model_config: Any, launch: Launch, bf16: bool) -> Pass:
    """How an update computes its rows."""
    stored = weight_type(config, model_config).itemsize
    weights = 2 if launch.is_deepspeed and bf16 else stored  # DeepSpeed turns the model into bfloat16
    rank = adapter_rank(config)
    language: Mode = "lora" if rank is not None else "frozen" if "language_model" in config.freeze else "full"
    return Pass(
        weights=weights,
        autocast=bf16 and weights == 4,
        language=language,
        vision=rank is None and "vision_tower" not in config.freeze,
        projector=rank is None and "projector" not in config.freeze,
        lora_rank=rank or 0,
        checkpointing=bool(config.gradient_checkpointing),
        attention=config.attn_implementation or "sdpa",
    )


def reference_bytes(config: GrpoConfig, model_config: Any, parameters: Parameters) -> int:
    """Of the frozen policy of the KL term: nothing below a fresh adapter, a second adapter where the run
    starts from one, else a whole copy."""
    if not config.beta:
        return 0
    start = adapter_folder(config)
    if adapter_rank(config) is None or not one_base_suffices(start):
        return weight_type(config, model_config).itemsize * parameters.base
    return parameters.trained_bytes if start else 0


def sequences(config: GrpoConfig, launch: Launch) -> int:
    """Replies decoded at once in one process."""
    episodes = -(-config.questions_per_step // launch.world_size) * config.num_generations
    return min(config.rollout_batch_size, config.max_concurrency, episodes)


def _cut(row: RowLength, limit: int) -> RowLength:
    tokens = min(row.tokens, limit)
    return RowLength(tokens, min(row.visual, tokens), min(row.sampled, tokens))


def _batch(config: GrpoConfig, row: RowLength, largest_image: int) -> Batch:
    rows = rows_at_once(config, row)
    return Batch(
        rows=rows,
        length=row.tokens,
        sampled=rows * row.sampled,
        patches=4 * rows * row.visual,
        image_patches=4 * min(largest_image, row.visual),
    )


def rows_at_once(config: GrpoConfig, row: RowLength) -> int:
    """Rows of this length in one micro-batch."""
    rows, most = config.per_device_train_batch_size, config.max_tokens_per_micro_batch
    return rows if most is None else max(1, min(rows, most // row.tokens))


# ---------------------------------------------------------------- does it fit


def device_bytes(options: PlanOptions) -> int | None:
    """Memory of a GPU: as given, or of the smallest one that is here; None when it is not known."""
    if options.plan_device_gib is not None:
        return round(options.plan_device_gib * GIB)
    import torch

    if not torch.cuda.is_available():
        return None
    devices = range(torch.cuda.device_count())
    return min(torch.cuda.get_device_properties(i).total_memory for i in devices)


def memory_findings(
    config: GrpoConfig, demand: Demand, launch: Launch, device: int | None, must_fit: str
) -> list[Finding]:
    """Whether both cases fit on a GPU of `device` bytes."""
    found = []
    if device is None:
        found.append(
            Finding("warning", "no GPU is here and plan_device_gib is not given: memory is not checked")
        )
    else:
        found += _fits(config, demand, device, must_fit)
    if launch.shards_weights:
        found.append(
            Finding(
                "warning",
                "rollouts read the whole policy in every process, so each makes a whole copy of the sharded "
                f"weights for them ({gib(demand.longest.gathered)})",
            )
        )
    if launch.world_size > config.questions_per_step:
        found.append(
            Finding(
                "warning",
                f"{launch.world_size} processes share the {config.questions_per_step} questions of a step: "
                f"{launch.world_size - config.questions_per_step} have no rollouts",
            )
        )
    return found


def _fits(config: GrpoConfig, demand: Demand, device: int, must_fit: str) -> list[Finding]:
    if demand.typical.peak > device:
        return [Finding("refused", _too_much("typical", demand.typical, demand.typical_row, device))]
    if demand.longest.peak > device:
        text = _too_much("longest", demand.longest, demand.longest_row, device)
        text += f"; the typical row takes {gib(demand.typical.peak)}{_remedy(config, demand, device)}"
        return [Finding("refused" if must_fit == "longest" else "warning", text)]
    if demand.longest.peak > TIGHT * device:
        return [
            Finding(
                "warning",
                f"the longest row takes {gib(demand.longest.peak)} of {gib(device)}: more than "
                f"{TIGHT:.0%}, which the allocator's gaps may exceed",
            )
        ]
    return []


def _too_much(which: str, memory: Memory, row: RowLength, device: int) -> str:
    phase = "an update" if memory.update >= memory.rollout else "a rollout batch"
    largest = max(memory.lines(), key=lambda line: line[1])
    return (
        f"{phase} takes {gib(memory.peak)} with the {which} row ({row.tokens:,} tokens, {row.sampled:,} "
        f"sampled), and a GPU has {gib(device)}; the largest part is {largest[0]} with {gib(largest[1])}"
    )


def _remedy(config: GrpoConfig, demand: Demand, device: int) -> str:
    """What would make the longest row fit, where that is plain."""
    excess = demand.longest.update - device
    if excess <= 0:
        return ""
    if demand.how.attention == "eager":
        return "; attn_implementation sdpa keeps no attention weights"
    if not config.gradient_checkpointing:
        return "; gradient_checkpointing takes less"
    fitting = demand.longest_row.sampled - excess // demand.bytes_a_sampled_token - 1
    shorter = "; rows of credit turn are shorter" if config.credit == "trajectory" else ""
    if fitting <= 0:
        return shorter
    return f"; rows of up to about {fitting:,} sampled tokens fit (turns × max_completion_length){shorter}"


def gib(number: int) -> str:
    return f"{number / GIB:.1f} GiB"
