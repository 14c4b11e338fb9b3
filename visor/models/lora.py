"""LoRA adapters on the language model, through PEFT: the one that trains, and a frozen reference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from visor.models.loading import load_model
from visor.models.options import ModelOptions
from visor.models.quantisation import is_quantised, quantisation_config

TARGET_MODULES = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
"""Every linear layer of the language model's blocks; the vision tower and the projector stay as they are."""
ADAPTER_CONFIG = "adapter_config.json"
POLICY = "default"
"""PEFT's name of the adapter that trains; files of an adapter of this name carry no name."""
REFERENCE = "reference"
"""Name of the frozen adapter, the one the run started from. It is never saved."""


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


def load_policy(options: ModelOptions, path: str | Path | None = None, *, device: str | None = None):
    """The model that trains: of `path` (a checkpoint), or the one the options start from, with a fresh
    adapter where they ask for one and there is none yet. ValueError for what cannot be trained."""
    path = path or options.model_name_or_path
    if is_quantised(options) and not (options.use_peft or is_adapter(path)):
        raise ValueError(
            "load_in_4bit and load_in_8bit hold weights that cannot train; set use_peft, or start from an "
            "adapter"
        )
    model = load_model(
        path,
        dtype=options.dtype or "auto",
        device=device if is_quantised(options) else None,
        attn_implementation=options.attn_implementation,
        freeze=options.freeze,
        quantisation=quantisation_config(options),
    )
    if options.use_peft and not is_peft_model(model):
        model = add_lora(
            model,
            rank=options.lora_r,
            alpha=options.lora_alpha,
            dropout=options.lora_dropout,
            seed=options.seed,
        )
    return model


def load_adapter(path: str | Path, *, trainable: bool = True, **kwargs):
    """Load the adapter in `path` on top of the base model its `adapter_config.json` names.

    `kwargs` are those of `load_model`. ValueError when the base model cannot be loaded.
    """
    from peft import PeftModel

    base = load_model(base_model_of(path), **kwargs)
    return PeftModel.from_pretrained(base, path, is_trainable=trainable)


def is_adapter(path: str | Path) -> bool:
    """True for a folder that holds an adapter instead of a whole model."""
    return (Path(path) / ADAPTER_CONFIG).is_file()


def base_model_of(path: str | Path) -> str:
    """The model that the adapter in a folder belongs to, as its configuration names it."""
    return _adapter_config(path)["base_model_name_or_path"]


def _adapter_config(path: str | Path) -> dict:
    return json.loads((Path(path) / ADAPTER_CONFIG).read_text(encoding="utf-8"))


def save_policy(model, folder: str | Path) -> None:
    """Write a model into a folder that plain `from_pretrained` loads; of a model with adapters, the one that
    trains and no other."""
    if is_peft_model(model):
        model.save_pretrained(folder, selected_adapters=[POLICY])
    else:
        model.save_pretrained(folder)


def is_peft_model(model) -> bool:
    """True for a model with adapters, by PEFT's own attribute."""
    return hasattr(model, "peft_config")


# ---------------------------------------------------------------- the reference on the policy's own base


class ReferencePolicy:
    """The policy that training started from, computed on the weights of the one in training.

    Called like a model. A run that started from an adapter has a frozen copy of it beside the one that
    trains; a run with a fresh adapter started from the bare model, which is what is left with adapters off.
    Either way there is one copy of the base weights, and dropout is off.
    """

    def __init__(self, model) -> None:
        """`model`: with adapters, unwrapped; `add_reference` has been called where there was a first one."""
        self.model = model

    def get_base_model(self):
        """The model without adapters, under PEFT's name for it."""
        return self.model.get_base_model()

    def __call__(self, **inputs):
        with reference_weights(self.model):
            return self.model(**inputs)


def one_base_suffices(path: str | Path | None) -> bool:
    """Whether policy and reference can share the base weights. `path`: the adapter a run starts from; None
    for a fresh one.

    They cannot where adapting a model changes what is not the adapter's: trained biases, and initialisations
    that take the adapter's first value out of the base weights. PEFT adds one such adapter to a model, and a
    second LoRA adapter only.
    """
    if path is None:
        return True
    config = _adapter_config(path)
    return (
        config.get("peft_type") == "LORA"
        and config.get("bias", "none") == "none"
        and config.get("init_lora_weights", True) in (True, False, "gaussian")
        and not config.get("trainable_token_indices")
    )


def add_reference(model, path: str | Path) -> None:
    """Put the adapter in `path` beside the one that trains, frozen and without dropout."""
    import torch
    from peft import LoraConfig

    config = LoraConfig.from_pretrained(str(path))
    config.lora_dropout = 0.0
    config.inference_mode = True
    with torch.random.fork_rng(devices=[]):  # its first values are drawn, and then overwritten
        model.add_adapter(REFERENCE, config)
    model.load_adapter(path, adapter_name=REFERENCE, is_trainable=False)
    model.set_adapter(POLICY)


@contextmanager
def reference_weights(model) -> Iterator[None]:
    """Inside, a model with adapters computes what it did when the run started."""
    if REFERENCE not in model.peft_config:
        with model.disable_adapter():
            yield
        return
    # Frozen: the default would make the reference trainable while it is the active one.
    model.set_adapter(REFERENCE, inference_mode=True)
    try:
        yield
    finally:
        model.set_adapter(POLICY)
