"""Weights in 4 or 8 bits below an adapter (QLoRA, Dettmers et al. 2023), through bitsandbytes."""

from __future__ import annotations

import importlib.util
from typing import Any

from visor.models.options import ModelOptions

UNQUANTISED = ("model.visual", "lm_head")
"""Vision tower, projector and output layer keep their type: they are small, and errors of theirs are seen by
every layer or by every reply."""


def is_quantised(options: ModelOptions) -> bool:
    return options.load_in_4bit or options.load_in_8bit


def quantisation_config(options: ModelOptions) -> Any:
    """The `BitsAndBytesConfig` of the options, or None. ValueError when bitsandbytes is not installed, or
    when the options leave the type to compute in open."""
    if not is_quantised(options):
        return None
    name = "load_in_4bit" if options.load_in_4bit else "load_in_8bit"
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(f"{name} needs bitsandbytes: pip install 'visor-rag[quant]', or leave {name} out")
    import torch
    from transformers import BitsAndBytesConfig

    if options.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=list(UNQUANTISED))
    if options.dtype in (None, "auto"):
        raise ValueError("load_in_4bit needs a dtype to compute in: set dtype to bfloat16 or float32")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=getattr(torch, options.dtype),
        bnb_4bit_quant_type=options.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=options.use_bnb_nested_quant,
        llm_int8_skip_modules=list(UNQUANTISED),
    )


def keep_trainable_on_cpu(model) -> None:
    """Keep bitsandbytes from repacking 4-bit weights at the first evaluation on a CPU with AVX-512: packed
    ones compute in bfloat16 and have no backward pass."""
    for module in model.modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False
