"""The policy in training → the weights an engine samples with, name by name.

`full_parameters` is the seam between training and any engine: whatever wraps, splits or adapts the policy, it
gives whole tensors under the names of the checkpoint, one at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor, nn

from grpo.sharding import unwrap_engine, whole_parameters
from visor.models.merging import merged_weights

ADAPTED = re.compile(r"(?P<layer>.+)\.base_layer\.(?P<kind>weight|bias)")
KEPT_ASIDE = re.compile(r"\.(lora_[^.]+|original_module)(\.|$)")
"""Parts of PEFT's modules that are no weights of the model: adapters, and what `modules_to_save` replaced."""
QUANTISED = ("Params4bit", "Int8Params")
"""Types of bitsandbytes' weights, which are given in the type they compute in."""
COPIED = re.compile(r"\.modules_to_save\.(?P<adapter>[^.]+)\.")


def full_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every weight of the present policy, as in the state dict of
    `Qwen2_5_VLForConditionalGeneration`; of tied weights one name.

    Wrappers (data parallelism, DeepSpeed) are looked through. A LoRA adapter is added into copies of its
    layers' weights, W + scale · B·A (Hu et al. 2021, section 4.1), so the trained weights are left as they
    are, to the last bit. All processes must go through all of it when the weights are sharded over them.
    ValueError for an adapter of another kind.
    """
    policy = unwrap_engine(model)
    if not hasattr(policy, "peft_config"):
        yield from whole_parameters(policy)
        return
    base: nn.Module = policy.get_base_model()  # type: ignore[operator]
    if any(type(parameter).__name__ in QUANTISED for parameter in base.parameters()):
        yield from merged_weights(policy)  # type: ignore[misc]
        return
    layers = _adapted_layers(base)
    # The adapters come first, because the weight of a layer is complete with all of its parts.
    adapters = {name: value.clone() for name, value in whole_parameters(base) if ".lora_" in name}
    for name, value in whole_parameters(base):
        if KEPT_ASIDE.search(name):
            continue
        adapted = ADAPTED.fullmatch(name)
        if adapted is None:
            yield COPIED.sub(".", name), value
            continue
        layer = adapted["layer"]
        if adapted["kind"] == "weight":
            value = _merged(layer, layers[layer], value, adapters)
        yield f"{layer}.{adapted['kind']}", value


def _adapted_layers(base: nn.Module) -> dict[str, nn.Module]:
    """PEFT's layers by name. ValueError for one whose weight is not W + scale · B·A."""
    layers = {name: module for name, module in base.named_modules() if hasattr(module, "lora_A")}
    for name, layer in layers.items():
        if any(getattr(layer, "use_dora", {}).values()):
            raise ValueError(
                f"{name} has a DoRA adapter, which cannot be given to an engine; merge it into the weights "
                "first or train plain LoRA"
            )
    return layers


def _merged(name: str, layer: nn.Module, weight: Tensor, adapters: dict[str, Tensor]) -> Tensor:
    """W + Σ scale · B·A over the active adapters, in the type of W; the product is computed in that of the
    adapter, as in the layer's own forward pass."""
    for adapter in layer.active_adapters:  # type: ignore[union-attr]
        if adapter not in layer.lora_A:  # type: ignore[operator]
            continue
        first = adapters[f"{name}.lora_A.{adapter}.weight"]
        second = adapters[f"{name}.lora_B.{adapter}.weight"]
        update = (second @ first) * layer.scaling[adapter]  # type: ignore[index]
        if getattr(layer, "fan_in_fan_out", False):
            update = update.T
        weight = (weight.to(update.dtype) + update).to(weight.dtype)
    return weight
