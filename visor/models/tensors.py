"""Rows → padded tensors, positions, and log-probabilities of tokens.

Axes: B rows, L padded length, N images of the batch, P patches of the batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch

from visor.models.base import ImageSource
from visor.models.loading import unwrap
from visor.models.output_layer import scoring
from visor.models.rendering import ChatRenderer, Span
from visor.types import ImageRef

MODEL_KEYS = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "mm_token_type_ids",
    "pixel_values",
    "image_grid_thw",
)
"""The keys of a batch that are arguments of the model."""
IGNORE_INDEX = -100


class Row(Protocol):
    """What `collate` reads: a `TrainingRow` or an `Encoded`. `loss_mask` and `old_logprobs` are optional."""

    input_ids: list[int]
    images: list[ImageRef]
    image_spans: list[Span]


def mrope_positions(
    length: int, image_spans: Sequence[Span], grids: Sequence[tuple[int, int, int]], merge_size: int = 2
) -> torch.Tensor:
    """(3, length) time, height and width positions of M-RoPE (Qwen2-VL, section 2.1).

    `image_spans` are the pads of each image, `grids` its (t, h, w) in patches. Tokens of an image share their
    start; text after it goes on at its start + max(h, w) / merge_size. Equal to `get_rope_index` of
    Transformers, except that only the pads of real images count as images.
    """
    positions = np.empty((3, length), dtype=np.int64)
    cursor = following = 0
    for (start, end), (t, h, w) in zip(image_spans, grids, strict=True):
        height, width = h // merge_size, w // merge_size
        positions[:, cursor:start] = following + np.arange(start - cursor)
        following += start - cursor
        positions[:, start:end] = following + np.indices((t, height, width)).reshape(3, -1)
        following += max(height, width)
        cursor = end
    positions[:, cursor:] = following + np.arange(length - cursor)
    return torch.from_numpy(positions)


def model_ids(row: Row, renderer: ChatRenderer) -> np.ndarray:
    """(len,) ids of a row as the model reads them: an image pad that belongs to no image (a policy can emit
    one) becomes a padding token, so that pads and image features agree."""
    ids = np.array(row.input_ids, dtype=np.int64)
    stray = ids == renderer.image_token_id
    for start, end in row.image_spans:
        stray[start:end] = False
    ids[stray] = renderer.pad_id
    return ids


def collate(
    rows: Sequence[Row],
    renderer: ChatRenderer,
    images: ImageSource,
    *,
    padding: Literal["left", "right"] = "right",
    pixels: bool = True,
    pad_to: int | None = None,
) -> dict[str, torch.Tensor]:
    """Pad rows into one batch, on the CPU.

    Returns `input_ids`, `attention_mask`, `mm_token_type_ids` (B, L) int64 (1 on image pads); `position_ids`
    (3, B, L); with images `image_grid_thw` (N, 3) and, unless `pixels` is off, `pixel_values` (P, 1176), both
    in row order. Rows with a loss mask also give `loss_mask` (B, L) bool and `labels` (B, L), -100 where
    untrained; rows that all have them, `old_logprobs` (B, L) float32. Sequences are padded to the longest row
    or to `pad_to`. AssertionError, naming the row, when its pads are not as many as its image features.
    """
    assert rows, "a batch needs at least one row"
    longest = max(len(row.input_ids) for row in rows)
    length = longest if pad_to is None else max(longest, pad_to)
    shape = (len(rows), length)
    batch = {
        "input_ids": torch.full(shape, renderer.pad_id),
        "attention_mask": torch.zeros(shape, dtype=torch.long),
        "mm_token_type_ids": torch.zeros(shape, dtype=torch.long),
        "position_ids": torch.zeros((3, *shape), dtype=torch.long),
    }
    grids: list[tuple[int, int, int]] = []
    offsets = []
    for index, row in enumerate(rows):
        row_grids = [renderer.grid(ref, images) for ref in row.images]
        _check_pads(row, row_grids, renderer, index)
        grids += row_grids
        offset = length - len(row.input_ids) if padding == "left" else 0
        offsets.append(offset)
        place = slice(offset, offset + len(row.input_ids))
        batch["input_ids"][index, place] = torch.from_numpy(model_ids(row, renderer))
        batch["attention_mask"][index, place] = 1
        for start, end in row.image_spans:
            batch["mm_token_type_ids"][index, offset + start : offset + end] = 1
        batch["position_ids"][:, index, place] = mrope_positions(
            len(row.input_ids), row.image_spans, row_grids, renderer.merge_size
        )
    if grids:
        batch["image_grid_thw"] = torch.tensor(grids)
        if pixels:
            arrays = [renderer.pixels(ref, images) for row in rows for ref in row.images]
            batch["pixel_values"] = torch.from_numpy(np.concatenate(arrays))
    _add_training_fields(batch, rows, offsets)
    return batch


def _add_training_fields(batch: dict[str, torch.Tensor], rows: Sequence[Row], offsets: list[int]) -> None:
    def padded(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        out = torch.zeros(batch["input_ids"].shape, dtype=dtype)
        for index, (offset, row_values) in enumerate(zip(offsets, values)):
            out[index, offset : offset + len(row_values)] = torch.tensor(row_values, dtype=dtype)
        return out

    masks = [getattr(row, "loss_mask", None) for row in rows]
    if any(mask is None for mask in masks):
        return
    batch["loss_mask"] = padded(masks, torch.bool)
    batch["labels"] = batch["input_ids"].masked_fill(~batch["loss_mask"], IGNORE_INDEX)
    old_logprobs = [getattr(row, "old_logprobs", None) for row in rows]
    if all(logprobs is not None for logprobs in old_logprobs):
        batch["old_logprobs"] = padded(old_logprobs, torch.float32)


def _check_pads(row: Row, grids: list[tuple[int, int, int]], renderer: ChatRenderer, index: int) -> None:
    name = getattr(row, "trajectory", "") or f"number {index}"
    assert len(row.image_spans) == len(grids), (
        f"row {name}: {len(row.image_spans)} spans, {len(grids)} images"
    )
    for ref, (start, end), (t, h, w) in zip(row.images, row.image_spans, grids):
        features = t * h * w // renderer.merge_size**2
        pads = sum(token == renderer.image_token_id for token in row.input_ids[start:end])
        assert pads == end - start == features, (
            f"row {name}: {pads} image pads in {start}:{end} for the {features} features of {ref.page_id}"
        )


def to_device(batch: dict[str, torch.Tensor], device) -> dict[str, torch.Tensor]:
    """Move every tensor of a batch."""
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()}


def model_inputs(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The part of a batch that the model takes."""
    return {key: batch[key] for key in MODEL_KEYS if key in batch}


def forward_logprobs(model, batch: dict[str, Any], *, entropy: bool = False):
    """(B, L) float32: at each position of `loss_mask` the log-probability of that token given its prefix, at
    temperature 1; 0 elsewhere. With `entropy`, a pair with the (B, L) entropy of that distribution in nats,
    which carries no gradient.

    The output layer runs at the masked positions only, through the model's own
    `forward`, so that wrapped models (DDP, DeepSpeed, PEFT) work, long prompts cost no logits, and many
    sampled tokens only those of a chunk at a time (`visor.models.output_layer`). With `image_features` in the
    batch the vision tower does not run. A token at position 0 has no prefix and cannot be scored
    (AssertionError).
    """
    mask = batch["loss_mask"].bool()
    assert not mask[:, 0].any(), "the first token of a row has no prefix to be scored under"
    predicting = torch.zeros_like(mask)
    predicting[:, :-1] = mask[:, 1:]
    targets = batch["input_ids"][mask]  # row-major, like the hidden states at `predicting`
    with scoring(model, predicting, targets, entropy):
        scores = model(**_training_inputs(model, batch), use_cache=False).logits
    empty = torch.zeros(mask.shape, dtype=torch.float32, device=scores.device)
    logprobs = empty.masked_scatter(mask, scores[:, 0])
    return (logprobs, empty.masked_scatter(mask, scores[:, 1].detach())) if entropy else logprobs


def _training_inputs(model, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The model's arguments. Rows padded on the right go without a mask: what follows a token does not reach
    it, and attention has faster kernels for plain causality."""
    inputs = model_inputs(batch)
    if bool(inputs["attention_mask"][:, 0].all()):
        del inputs["attention_mask"]
    if "image_features" not in batch:
        return inputs
    embeddings = unwrap(model).get_input_embeddings()(batch["input_ids"])
    pads = batch["mm_token_type_ids"].bool()[..., None]
    features = batch["image_features"].to(embeddings.dtype)
    for name in ("input_ids", "mm_token_type_ids", "image_grid_thw", "pixel_values"):
        inputs.pop(name, None)
    return inputs | {"inputs_embeds": embeddings.masked_scatter(pads, features)}
