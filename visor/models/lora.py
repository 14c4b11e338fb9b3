"""LoRA adapters on the language model, through PEFT."""

from __future__ import annotations

import json
from pathlib import Path

from visor.models.loading import load_model

TARGET_MODULES = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
"""Every linear layer of the language model's blocks; the vision tower and the projector stay as they are."""


def add_lora(model, *, rank: int = 16, alpha: int = 32, dropout: float = 0.0, seed: int = 0):
    """Wrap a model with a fresh adapter (LoRA, Hu et al. 2021): its own weights freeze, the adapter trains.

    The wrapped model computes what the bare one does until the first update.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=TARGET_MODULES)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(model, config)


def load_adapter(path: str | Path, *, trainable: bool = True, **kwargs):
    """Load the adapter in `path` on top of the base model its `adapter_config.json` names.

    `kwargs` are those of `load_model`. ValueError when the base model cannot be loaded.
    """
    from peft import PeftModel

    config = json.loads((Path(path) / "adapter_config.json").read_text(encoding="utf-8"))
    base = load_model(config["base_model_name_or_path"], **kwargs)
    return PeftModel.from_pretrained(base, path, is_trainable=trainable)
