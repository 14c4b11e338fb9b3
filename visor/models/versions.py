"""Where the supported versions of Transformers differ, and what is the same to all of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

CACHE_ARGUMENT = (
    "cache" if "cache" in inspect.signature(Qwen2_5_VLTextModel.forward).parameters else "past_key_values"
)
"""What the language model calls its key-value cache: `cache` from Transformers 5.24 on."""


@contextmanager
def logits_at(output_layer: torch.nn.Module, mask: torch.Tensor) -> Iterator[None]:
    """Inside, the output layer computes logits where the (B, L) bool `mask` is true and nowhere else: (N, V),
    row-major. Only newer versions take such a mask as `logits_to_keep`."""

    def select(module: torch.nn.Module, arguments: tuple[Any, ...]) -> torch.Tensor:
        return arguments[0][mask]

    hook = output_layer.register_forward_pre_hook(select)
    try:
        yield
    finally:
        hook.remove()
