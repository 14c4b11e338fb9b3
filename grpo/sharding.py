"""The whole policy out of one whose weights are split among processes (DeepSpeed ZeRO-3, FSDP).

Every function here that reads split weights is to be called on all processes at once.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from visor.models.loading import unwrap


class WholePolicy:
    """The policy as one plain model, to sample with and to save.

    `model` is the policy itself where every process holds all of it. Where the weights are split it is a copy
    of its structure whose parameters are empty but inside `present()`.
    """

    def __init__(self, model: nn.Module, trained: nn.Module | None = None) -> None:
        """`trained`: the split policy to take the weights from; None = `model` has them."""
        self.model = model
        self._trained = trained

    @property
    def is_split(self) -> bool:
        return self._trained is not None

    @contextmanager
    def present(self) -> Iterator[nn.Module]:
        """Inside, `model` has all its weights: one whole copy on each process."""
        if self._trained is None:
            yield self.model
            return
        places = dict(self.model.named_parameters())
        try:
            for name, tensor in gathered_parameters(self._trained):
                places[name].data = tensor.to(places[name].dtype)
            yield self.model
        finally:
            for parameter in places.values():
                parameter.data = parameter.data.new_empty(0)


def without_weights(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a model on a device, in eval mode, with an empty tensor in the place of each parameter;
    buffers are copied, tied parameters stay tied."""
    places = {
        id(parameter): nn.Parameter(
            torch.empty(0, dtype=parameter.dtype, device=device), requires_grad=parameter.requires_grad
        )
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, places).to(device).eval()


def full_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every parameter of a split policy, under the names of the plain Qwen2.5-VL
    module, tied ones once. A LoRA adapter is merged: W + scale · B A in the place of W. One parameter, with
    its adapter's, is gathered at a time.
    """
    base = unwrap(model)
    _split_again(base)
    for names in _together(list(dict(base.named_parameters()))):
        parts = dict(_gathered(base, names))
        yield from _merged(base, parts)


def gathered_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every parameter, under the module's own names (those of an adapter included),
    one gathered at a time; a tensor is a copy of its own."""
    inner = unwrap_engine(model)
    _split_again(inner)
    for name in dict(inner.named_parameters()):
        yield from _gathered(inner, [name])


def unwrap_engine(model: nn.Module) -> nn.Module:
    """The model inside a DeepSpeed engine or DDP, with its adapters."""
    while hasattr(model, "module"):
        model = model.module
    return model


def _split_again(model: nn.Module) -> None:
    """FSDP leaves outer parts gathered after a forward pass that no backward pass follows."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def _gathered(model: nn.Module, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    with torch.no_grad():
        for name in names:
            parameter = model.get_parameter(name)
            if hasattr(parameter, "ds_id"):
                from deepspeed.runtime.zero import GatheredParameters

                with GatheredParameters([parameter]):
                    whole = parameter.detach().clone()
            elif hasattr(parameter, "full_tensor"):
                whole = parameter.full_tensor().detach()
            else:
                whole = parameter.detach().clone()
            yield name, whole


# ---------------------------------------------------------------- adapters


def _together(names: Sequence[str]) -> list[list[str]]:
    """Names that are gathered together: a weight and the adapter's matrices on it, everything else alone."""
    groups: dict[str, list[str]] = {}
    for name in names:
        owner, separator, _ = name.partition(".lora_")
        key = f"{owner}.base_layer.weight" if separator else name
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def _merged(base: nn.Module, parts: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    name = next(name for name in parts if ".lora_" not in name)
    weight = parts[name]
    owner, separator, _ = name.rpartition(".base_layer.")
    if separator and len(parts) > 1:
        layer = base.get_submodule(owner)
        for adapter in layer.active_adapters:
            down = parts[f"{owner}.lora_A.{adapter}.weight"].float()
            up = parts[f"{owner}.lora_B.{adapter}.weight"].float()
            weight = weight + (layer.scaling[adapter] * (up @ down)).to(weight.dtype)
    yield name.replace(".base_layer.", "."), weight
