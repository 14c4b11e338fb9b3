"""The weights of an adapted or quantised model as those of a plain one, for engines without adapters."""

from __future__ import annotations

from collections.abc import Iterator

from visor.models.loading import unwrap

_ADAPTER_PARTS = ("lora_", "modules_to_save.")


def merged_weights(model) -> Iterator[tuple[str, object]]:
    """(name, tensor) of every parameter of the model without its adapter, W + scale · B A in the place of W.

    Names are the plain model's own, tied parameters come once. The weights of the model stay as they are, so
    that nothing is rounded by merging and taking apart again. Quantised weights are dequantised, to the type
    they compute in. Only the adapter that is active is merged.
    """
    import torch

    base = unwrap(model)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if any(part in name for part in _ADAPTER_PARTS):
                continue
            owner, _, kind = name.rpartition(".")
            module = base.get_submodule(owner)
            weight = _dequantised(module, parameter) if kind == "weight" else parameter.detach()
            plain = name.replace(".base_layer.", ".").replace(".original_module.", ".")
            if kind == "weight" and owner.endswith(".base_layer"):
                layer = base.get_submodule(owner.removesuffix(".base_layer"))
                for adapter in layer.active_adapters:
                    weight = weight + layer.get_delta_weight(adapter).to(weight.dtype)
            yield plain, weight


def _dequantised(module, parameter):
    kind = type(parameter).__name__
    if kind == "Params4bit":
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(parameter.data, parameter.quant_state).to(module.compute_dtype)
    if kind == "Int8Params":
        # A row's scale is its largest value; the layer takes the scales over at its first pass.
        scales = parameter.SCB if module.state.SCB is None else module.state.SCB
        return parameter.data.float() * (scales.float() / 127)[:, None]
    return parameter.detach()
