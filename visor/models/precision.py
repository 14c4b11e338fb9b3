"""Precision, attention and gradient checkpointing where the settings leave them open: by device."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import TypeVar

from visor.models.lora import is_adapter
from visor.models.options import ModelOptions

OptionsT = TypeVar("OptionsT", bound=ModelOptions)
FLASH_ATTENTION = "flash_attention_2"


@dataclass(frozen=True)
class DeviceFacts:
    """What the choice depends on."""

    kind: str
    """cpu, cuda, mps, xpu, …"""
    bf16: bool = False
    """It computes in bfloat16 at full speed."""
    flash_attention: bool = False
    """flash-attn is installed."""
    master_weights: bool = False
    """The optimizer keeps float32 copies of bfloat16 weights, as DeepSpeed's does."""


def device_facts() -> DeviceFacts:
    """Of the device that Accelerate would train on, in this process's environment."""
    import torch
    from accelerate.utils import parse_flag_from_env

    kind = "cpu"
    if not parse_flag_from_env("ACCELERATE_USE_CPU"):
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        kind = accelerator.type if accelerator is not None else "cpu"
    return DeviceFacts(
        kind=kind,
        # Emulated bfloat16 (before Ampere) is slower than float32.
        bf16=kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False),
        flash_attention=importlib.util.find_spec("flash_attn") is not None,
        master_weights=os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true",
    )


def with_device_defaults(options: OptionsT, facts: DeviceFacts) -> OptionsT:
    """The options with dtype, bf16, attn_implementation and gradient_checkpointing filled in.

    - bf16: on a CUDA device with bfloat16, else off.
    - dtype: bfloat16 where bf16 is on and the weights in it are not those an optimizer moves by small steps:
      below an adapter, or with float32 copies in the optimizer. Else float32: at a learning rate of 1e-6 most
      steps are smaller than a bfloat16 weight can take.
    - attn_implementation: flash_attention_2 with weights in bfloat16, where it is installed.
    - gradient_checkpointing: on everywhere but on the CPU.
    """
    bf16 = facts.kind == "cuda" and facts.bf16 if options.bf16 is None else options.bf16
    adapter = options.use_peft or is_adapter(options.model_name_or_path)
    dtype = options.dtype
    if dtype is None:
        dtype = "bfloat16" if bf16 and (adapter or facts.master_weights) else "float32"
    attention = options.attn_implementation
    if attention is None and facts.kind == "cuda" and facts.flash_attention and dtype == "bfloat16":
        attention = FLASH_ATTENTION
    checkpointing = options.gradient_checkpointing
    return options.model_copy(
        update={
            "bf16": bf16,
            "dtype": dtype,
            "attn_implementation": attention,
            "gradient_checkpointing": facts.kind != "cpu" if checkpointing is None else checkpointing,
        }
    )
