"""What a vLLM engine of a run has to take: what `--plan` prints and the run's engine is made with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo.arguments import GrpoConfig
from grpo.planning.context import ContextPlan


@dataclass(frozen=True)
class EngineLimits:
    max_model_len: int
    """Tokens of prompt and reply."""
    images: int
    """Of one prompt."""


def engine_limits(config: GrpoConfig, contexts: Sequence[ContextPlan], positions: int) -> EngineLimits:
    """The limits for the longest contexts of training and, where there is one, of validation, within the
    model's `positions`. `vllm_max_model_length` stands in for the length."""
    needed = min(max(context.max_context for context in contexts), positions)
    return EngineLimits(
        max_model_len=config.vllm_max_model_length or needed,
        images=max(context.max_images for context in contexts),
    )


def engine_shortfall(config: GrpoConfig, context: ContextPlan) -> str | None:
    """Why a run cannot do what its settings say within `vllm_max_model_length`; None when it can."""
    length, needed = config.vllm_max_model_length, context.max_context
    if not config.use_vllm or length is None or length >= needed:
        return None
    prompt = length - config.max_completion_length
    remedy = f", or max_prompt_length to at most {prompt:,}" if prompt > 0 else ""
    return (
        f"a context of {needed:,} tokens is possible ({context.max_prompt:,} of prompt and "
        f"max_completion_length {config.max_completion_length:,}), over vllm_max_model_length {length:,}; "
        f"set that to at least {needed:,}{remedy}"
    )
