"""Muon for matrices and AdamW for the rest, as one optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return (matrices, others) among the trainable parameters.

    Matrices are the two-dimensional weights of the language and vision blocks. Embeddings, the output head,
    norms, biases and the patch convolution are the others: Muon's orthogonal update is meant for hidden
    matrices only (Keller Jordan, "Muon", 2024).
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if find_head else None
    if head is not None:
        tables.add(id(head.weight))
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            is_matrix = parameter.ndim == 2 and id(parameter) not in tables
            (matrices if is_matrix else others).append(parameter)
    return matrices, others


def adamw(
    parameters: Iterable[nn.Parameter], learning_rate: float, weight_decay: float = 0.0, betas=(0.9, 0.999)
):
    """AdamW in its fused form, one pass over the parameters on CPU and GPU alike."""
    return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=weight_decay, betas=betas, fused=True)


class MuonWithAdamW(torch.optim.Optimizer):
    """One optimizer for a Trainer: `torch.optim.Muon` on matrices, AdamW on everything else.

    Schedulers see the parameter groups of both, each with its own learning rate.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        muon_learning_rate: float,
        learning_rate: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        matrices, others = split_parameters(model)
        if not (matrices and others):
            raise ValueError("Muon needs both matrices and other parameters to train; use optimizer: adamw")
        self.muon = torch.optim.Muon(
            matrices, lr=muon_learning_rate, momentum=momentum, weight_decay=weight_decay
        )
        self.adamw = adamw(others, learning_rate, weight_decay, betas)
        super().__init__([{"params": matrices}, {"params": others}], {})
        self._share_groups()

    def _share_groups(self) -> None:
        # The very dictionaries of the two: a learning rate set by a scheduler is the one they step with.
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            raise ValueError("MuonWithAdamW takes no closure")
        self.muon.step()
        self.adamw.step()

    def state_dict(self) -> dict:
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state_dict: dict) -> None:
        self.muon.load_state_dict(state_dict["muon"])
        self.adamw.load_state_dict(state_dict["adamw"])
        self._share_groups()
