"""Where the supported versions of Transformers differ."""

from __future__ import annotations

import inspect

from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

CACHE_ARGUMENT = (
    "cache" if "cache" in inspect.signature(Qwen2_5_VLTextModel.forward).parameters else "past_key_values"
)
"""What the language model calls its key-value cache: `cache` from Transformers 5.24 on."""
