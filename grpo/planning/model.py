"""What a plan needs of the policy: its configuration, its parameters without their values, its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.arguments import GrpoConfig
from visor.models.hub import CONFIG, cached_folder, is_hub_name
from visor.models.loading import freeze_parts, unwrap
from visor.models.lora import ADAPTER_CONFIG, is_adapter
from visor.models.quantisation import is_quantised

BYTES_OF_4_BIT = 0.5 + 4 / 64
"""Of a 4-bit weight with a float32 scale for each block of 64."""
BYTES_OF_NESTED_4_BIT = 0.5 + 1 / 64 + 4 / (64 * 256)
"""With scales in 8 bits, and a float32 scale for each 256 of them (QLoRA, section 3)."""
BYTES_OF_8_BIT = 1.0
"""Without the scales, one a row."""


@dataclass(frozen=True)
class Parameters:
    """Numbers and bytes of a model's parameters, tied ones once."""

    trained: int
    trained_bytes: int
    frozen: int
    frozen_bytes: int
    trained_tensors: int
    base: int
    """Without an adapter's."""
    largest_layer: int
    """Parameters of the largest layer, which sharded training gathers at a time."""
    outside_layers: int
    """Parameters of embeddings, output layer, norms and projector."""

    @property
    def number(self) -> int:
        return self.trained + self.frozen

    @property
    def bytes(self) -> int:
        return self.trained_bytes + self.frozen_bytes


def model_folder(path: str) -> Path:
    """The folder that holds the configuration of a model: its own, or that of a hub model in the local cache.

    ValueError, saying what to give instead, when there is none.
    """
    folder = cached_folder(path) if is_hub_name(path) else Path(path)
    if folder is None or not ((folder / CONFIG).is_file() or (folder / ADAPTER_CONFIG).is_file()):
        missing = f"{path} has no {CONFIG}"
        if is_hub_name(path):
            missing = f"there is no folder {path}, and no model of this name in the local cache of the hub"
        elif not Path(path).exists():
            missing = f"there is no folder {path}"
        raise ValueError(
            f"{missing}; give --model_name_or_path a folder with the model's {CONFIG} and, for exact "
            "figures, its tokenizer.json; a plan needs no weights"
        )
    return folder


def read_model_config(path: str, *, download: bool = False) -> Any:
    """The `Qwen2_5_VLConfig` at a path; of a LoRA adapter, that of its base model. ValueError when there is
    none, or one of another kind of model. `download`: a hub model need not be in the cache."""
    from transformers import Qwen2_5_VLConfig

    if download and is_hub_name(path):
        return Qwen2_5_VLConfig.from_pretrained(path)
    folder = model_folder(path)
    if (folder / ADAPTER_CONFIG).is_file():
        adapter = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        return read_model_config(adapter["base_model_name_or_path"], download=download)
    try:
        model_type = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("model_type")
        if model_type != "qwen2_5_vl":
            raise ValueError(f"its model_type is {model_type!r}; only Qwen2.5-VL (qwen2_5_vl) is supported")
        return Qwen2_5_VLConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{folder / CONFIG} is not usable: {error}") from error


def read_tokenizer(path: str):
    """The tokenizer at a path, or None when there is none."""
    from transformers import AutoTokenizer

    folder = model_folder(path)
    if not (folder / "tokenizer.json").is_file():
        return None
    return AutoTokenizer.from_pretrained(folder)


def adapter_rank(config: GrpoConfig) -> int | None:
    """Rank of the LoRA adapter that is trained; None when the weights themselves are."""
    folder = adapter_folder(config)
    if folder is not None:
        return json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))["r"]
    return config.lora_r if config.use_peft else None


def adapter_folder(config: GrpoConfig) -> Path | None:
    """The adapter that a run starts from; None where it starts from a whole model."""
    folder = model_folder(config.model_name_or_path)
    return folder if is_adapter(folder) else None


def quantised_bytes(config: GrpoConfig) -> float:
    """Of a quantised weight."""
    if config.load_in_8bit:
        return BYTES_OF_8_BIT
    return BYTES_OF_NESTED_4_BIT if config.use_bnb_nested_quant else BYTES_OF_4_BIT


def weight_type(config: GrpoConfig, model_config: Any):
    """The `torch.dtype` the policy's weights are loaded in."""
    import torch

    name = config.dtype or "auto"
    if name == "auto":
        stored = model_config.dtype or model_config.text_config.dtype or torch.float32
        return getattr(torch, str(stored).removeprefix("torch."))
    return getattr(torch, name)


def count_parameters(config: GrpoConfig, model_config: Any) -> Parameters:
    """Parameters of the policy as `grpo.build` makes it: its own class, freezing and adapter, on the meta
    device, where a tensor has a shape and no values."""
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration

    from visor.models.lora import add_lora

    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(model_config).to(weight_type(config, model_config))
        freeze_parts(model, config.freeze)
        rank = adapter_rank(config)
        if rank is not None:
            model = add_lora(model, rank=rank)
    base = unwrap(model)
    linear = _quantised_weights(base) if is_quantised(config) else set()
    each = quantised_bytes(config)
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    sizes = [
        _number(layer.parameters())
        for layer in [*base.model.language_model.layers, *base.model.visual.blocks]
    ]
    return Parameters(
        trained=_number(trained),
        trained_bytes=sum(p.nbytes for p in trained),
        frozen=_number(frozen),
        frozen_bytes=round(sum(p.numel() * each if id(p) in linear else p.nbytes for p in frozen)),
        trained_tensors=len(trained),
        base=_number(p for name, p in model.named_parameters() if ".lora_" not in name),
        largest_layer=max(sizes),
        outside_layers=_number(model.parameters()) - sum(sizes),
    )


def _number(parameters: Iterable) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _quantised_weights(base) -> set[int]:
    """Ids of the weights that are quantised: those of every linear layer of the language model's blocks."""
    import torch

    linear = (m for m in base.model.language_model.modules() if isinstance(m, torch.nn.Linear))
    return {id(module.weight) for module in linear if not module.weight.requires_grad}
