"""The whole policy out of one whose weights are split among processes (DeepSpeed ZeRO-3, FSDP).

Every function here that reads split weights is to be called on all processes at once.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


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
            for name, tensor in whole_parameters(self._trained):
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


def whole_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every parameter, under the module's own names (those of an adapter included),
    one gathered at a time. A tensor that is not split is the parameter's own, detached."""
    inner = unwrap_engine(model)
    _split_again(inner)
    with torch.no_grad():
        for name, parameter in inner.named_parameters():
            if hasattr(parameter, "ds_id"):
                from deepspeed.runtime.zero import GatheredParameters

                with GatheredParameters([parameter]):
                    whole = parameter.detach().clone()
            elif hasattr(parameter, "full_tensor"):
                whole = parameter.full_tensor().detach()
            else:
                whole = parameter.detach()
            yield name, whole


def unwrap_engine(model: nn.Module) -> nn.Module:
    """The model inside a DeepSpeed engine or DDP, with its adapters."""
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module  # type: ignore[assignment]
    return model


def _split_again(model: nn.Module) -> None:
    """FSDP leaves outer parts gathered after a forward pass that no backward pass follows."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()  # type: ignore[operator]
