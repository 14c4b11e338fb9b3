"""A picture without influence, for micro-batches that must run the vision tower and have no picture."""

from __future__ import annotations

import torch
from torch import Tensor

from visor.models.rendering import ChatRenderer
from visor.models.tensors import IGNORE_INDEX


def with_blank_picture(batch: dict[str, Tensor], renderer: ChatRenderer) -> dict[str, Tensor]:
    """The batch with the smallest picture, one image token, behind the end of its rows; unchanged when it has
    pictures.

    The token is the last position of the first row, where neither a trained token sees it nor anything is
    predicted: loss and gradients stay what they are, the vision tower runs, and its gradients are zeros
    instead of missing.
    """
    if "pixel_values" in batch:
        return batch
    values = {"input_ids": renderer.pad_id, "labels": IGNORE_INDEX}  # of the new position; 0 elsewhere
    widened = {}
    for key, tensor in batch.items():
        column = tensor.new_full((*tensor.shape[:-1], 1), values.get(key, 0))
        widened[key] = torch.cat([tensor, column], -1)
    widened["input_ids"][0, -1] = renderer.image_token_id
    widened["attention_mask"][0, -1] = 1
    widened["mm_token_type_ids"][0, -1] = 1
    side, device = renderer.merge_size, batch["input_ids"].device
    colours = 3
    patch = colours * renderer.image_processor.temporal_patch_size * renderer.patch_size**2
    widened["image_grid_thw"] = torch.tensor([[1, side, side]], device=device)
    widened["pixel_values"] = torch.zeros((side * side, patch), device=device)
    return widened
