"""Bytes that a forward and backward pass needs beside weights and gradients.

What autograd keeps is counted tensor by tensor, as Transformers' Qwen2.5-VL code makes it keep them: the
functions below name each one. Symbols: H hidden size, I size of the MLP, K width of the keys, A attention
heads, L length of a padded row, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from visor.models.output_layer import tokens_at_once

FLOAT32 = 4
LOGIT_PEAK = 16
"""Bytes a (sampled token, entry of the vocabulary) of those scored at once: the float32 logits, and in the
backward pass the gradients through gather and log-sum-exp with a temporary of the latter."""
LOGIT_FORWARD = 14
"""Of the same in the forward pass: the logits, their float32 copy, and two temporaries of the entropy."""
LOGIT_GRADIENT = 6
"""Of the same while the gradient of the output layer's weight is made: its gradient in two types."""
PIXELS_OF_A_PATCH = 1176
"""Values of one patch: 3 channels × 2 frames × 14 × 14."""

Mode = Literal["full", "lora", "frozen"]


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen2.5-VL model."""

    hidden: int
    mlp: int
    keys: int
    """Width of the keys of all key heads together."""
    heads: int
    head: int
    """Width of one attention head."""
    layers: int
    vocabulary: int
    tied: bool
    """The output layer is the embedding matrix."""
    vision_hidden: int
    vision_mlp: int
    vision_heads: int
    vision_layers: int
    vision_full: int
    """Blocks of the vision tower that attend to the whole image; the others attend within windows."""
    window_patches: int
    """Patches of one window of the vision tower."""

    @classmethod
    def of(cls, config: Any) -> Shape:
        """From a `Qwen2_5_VLConfig`."""
        text, vision = config.text_config, config.vision_config
        head = text.hidden_size // text.num_attention_heads
        return cls(
            hidden=text.hidden_size,
            mlp=text.intermediate_size,
            keys=text.num_key_value_heads * head,
            heads=text.num_attention_heads,
            head=head,
            layers=text.num_hidden_layers,
            vocabulary=text.vocab_size,
            tied=bool(config.tie_word_embeddings),
            vision_hidden=vision.hidden_size,
            vision_mlp=vision.intermediate_size,
            vision_heads=vision.num_heads,
            vision_layers=vision.depth,
            vision_full=len(vision.fullatt_block_indexes),
            window_patches=(vision.window_size // vision.patch_size) ** 2,
        )


@dataclass(frozen=True)
class Pass:
    """How a batch is computed."""

    weights: int
    """Bytes of a stored weight, and of a value between the layers."""
    autocast: bool = False
    """Linear layers compute in bfloat16 over float32 weights."""
    language: Mode = "full"
    vision: bool = False
    """The vision tower trains."""
    projector: bool = False
    """The projector trains."""
    lora_rank: int = 16
    checkpointing: bool = False
    """Gradient checkpointing of the layers."""
    attention: str = "sdpa"
    """sdpa and flash_attention_2 keep no attention weights, eager keeps them all."""

    @property
    def compute(self) -> int:
        """Bytes of the output of a linear layer."""
        return 2 if self.autocast else self.weights

    @property
    def features(self) -> bool:
        """Image features come ready: nothing of what makes them trains."""
        return not (self.vision or self.projector)

    @property
    def through_vision(self) -> bool:
        """Gradients run through the vision tower."""
        return self.vision

    @property
    def through_projector(self) -> bool:
        return self.projector or self.through_vision


@dataclass(frozen=True)
class Batch:
    """A micro-batch."""

    rows: int
    length: int
    """Tokens of the longest row, to which the others are padded."""
    sampled: int
    """Trained tokens of all rows."""
    patches: int = 0
    """Patches of all images: image tokens × 4."""
    image_patches: int = 0
    """Patches of the largest image."""

    @property
    def tokens(self) -> int:
        return self.rows * self.length


def kept_by_layer(shape: Shape, how: Pass, batch: Batch) -> int:
    """Bytes autograd keeps for one layer of the language model."""
    per_token = 2 * _norm(shape.hidden, how, how.language == "full")
    per_token += _linear_inputs(shape, how)
    per_token += 3 * how.compute * shape.mlp  # gate, up, and the gate after its activation
    if how.attention == "eager":
        per_token += 4 * how.compute * shape.hidden
        per_token += shape.heads * batch.length * (FLOAT32 + (how.compute if how.compute < FLOAT32 else 0))
    else:
        per_token += 2 * how.compute * (shape.hidden + shape.keys) + FLOAT32 * shape.heads
    return per_token * batch.tokens


def _norm(width: int, how: Pass, trains: bool) -> int:
    """RMSNorm computes in float32 and keeps its input, the reciprocal root and, to train its weight, the
    product."""
    return FLOAT32 * width + FLOAT32 + (how.weights * width if trains else 0)


def _linear_inputs(shape: Shape, how: Pass) -> int:
    """What the weights of a layer, or their adapters, need of their inputs. The attention's output is kept by
    the attention already. Autocast and adapters of another type make a copy for every linear layer."""
    if how.language == "frozen":
        return 0
    bytes_each = how.compute
    copies = how.autocast
    if how.language == "lora":
        bytes_each = 2 if how.autocast else FLOAT32  # PEFT keeps adapters in float32
        copies = how.autocast or how.weights != FLOAT32
    inputs = (3 + 2 if copies else 1 + 1) * shape.hidden + shape.mlp
    if how.language == "lora":
        inputs += 7 * how.lora_rank + (shape.hidden if copies else 0)
    return bytes_each * inputs


def kept_by_vision_block(shape: Shape, how: Pass, batch: Batch, *, whole_image: bool) -> int:
    """Bytes autograd keeps for one block of the vision tower."""
    width, mlp, compute = shape.vision_hidden, shape.vision_mlp, how.compute
    per_patch = 2 * _norm(width, how, how.vision)
    per_patch += compute * (2 + 3 + 1) * width  # q and k after rotation, all of qkv, output of the attention
    per_patch += 3 * compute * mlp
    if how.attention == "eager":
        chunk = batch.image_patches if whole_image else min(shape.window_patches, batch.image_patches)
        per_patch += shape.vision_heads * chunk * (FLOAT32 + (compute if compute < FLOAT32 else 0))
    else:
        per_patch += FLOAT32 * shape.vision_heads
    if how.vision:
        inputs = 3 if how.autocast else 2
        per_patch += compute * (inputs * width + width + mlp)
    return per_patch * batch.patches


def kept_by_vision(shape: Shape, how: Pass, batch: Batch) -> int:
    """Of the vision tower and the projector together."""
    kept = 0
    width = shape.vision_hidden
    if how.through_vision:
        if how.checkpointing:
            kept += shape.vision_layers * how.weights * width * batch.patches
        else:
            whole = kept_by_vision_block(shape, how, batch, whole_image=True)
            windowed = kept_by_vision_block(shape, how, batch, whole_image=False)
            kept += shape.vision_full * whole + (shape.vision_layers - shape.vision_full) * windowed
            kept += 2 * FLOAT32 * (width // shape.vision_heads) * batch.patches  # sines and cosines
    if how.vision and how.compute != FLOAT32:
        kept += how.compute * PIXELS_OF_A_PATCH * batch.patches
    if how.through_projector:
        per_patch = how.compute * width  # before the projector's activation
        if how.through_vision or how.projector:
            per_patch += _norm(width, how, how.projector)
        if how.projector:
            per_patch += 2 * how.compute * width
        kept += per_patch * batch.patches
    return kept


def kept_for_backward(shape: Shape, how: Pass, batch: Batch) -> int:
    """Bytes autograd keeps between the forward and the backward pass, without the logits."""
    kept = kept_by_vision(shape, how, batch)
    if how.checkpointing:
        kept += shape.layers * how.weights * shape.hidden * batch.tokens
    else:
        kept += shape.layers * kept_by_layer(shape, how, batch)
        kept += 2 * how.weights * shape.head * batch.tokens  # sines and cosines
    kept += _norm(shape.hidden, how, how.language == "full") * batch.tokens
    if how.language == "full" or batch.sampled > tokens_at_once(shape.vocabulary):
        kept += how.compute * shape.hidden * batch.sampled
    if how.autocast:
        kept += 2 * shape.hidden * shape.vocabulary
        kept += 0 if how.checkpointing else weight_casts(shape, how)
    return kept


def weight_casts(shape: Shape, how: Pass) -> int:
    """Bytes of the bfloat16 copies that autocast makes of the layers' linear weights, and keeps: those of the
    output layer are apart."""
    elements = shape.layers * shape.hidden * (2 * shape.hidden + 2 * shape.keys + 3 * shape.mlp)
    if how.through_vision:
        width = shape.vision_hidden
        elements += shape.vision_layers * width * (4 * width + 3 * shape.vision_mlp)
        elements += 4 * width * (4 * width + shape.hidden)  # the projector
    return 2 * elements


def peak(shape: Shape, how: Pass, batch: Batch) -> int:
    """Most bytes at once of a forward and backward pass, gradients that are kept not counted.

    The largest of these moments: in the vision tower, where features are made beforehand; at the logits;
    where the gradient of the output layer's weight is made; in the layers, where a checkpointed one is
    computed again; and at the embeddings, when the rest is freed.
    """
    kept = kept_for_backward(shape, how, batch)
    scored = min(batch.sampled, tokens_at_once(shape.vocabulary))
    logits = scored * shape.vocabulary
    matrix = how.weights * shape.hidden * shape.vocabulary if how.language == "full" else 0
    chunked = batch.sampled > scored
    summed = matrix if chunked else 0  # the gradients of earlier chunks
    casts = weight_casts(shape, how) if how.autocast and how.checkpointing else 0
    # A tied matrix has two gradients: the first waits for the second, and their sum is a third.
    waiting, at_embeddings = (matrix, 3 * matrix) if shape.tied else (0, matrix)
    moments = [
        kept + max(LOGIT_PEAK * logits + summed, LOGIT_FORWARD * logits + casts),
        kept + LOGIT_GRADIENT * logits + matrix + summed,
        kept + waiting + _in_layers(shape, how, batch),
        at_embeddings + how.compute * shape.hidden * batch.tokens,
    ]
    if not how.features:
        return FLOAT32 * PIXELS_OF_A_PATCH * batch.patches + max(moments)
    return max(
        how.weights * shape.hidden * batch.patches // 4 + max(moments),
        seeing(shape, how.weights, batch.patches),
    )


def seeing(shape: Shape, each: int, patches: int) -> int:
    """The most bytes while the vision tower makes the features of images without gradient, `each` bytes a
    value."""
    values = each * (3 * shape.vision_mlp + 6 * shape.vision_hidden) + FLOAT32 * shape.vision_hidden
    return patches * (FLOAT32 * PIXELS_OF_A_PATCH + values)


def _in_layers(shape: Shape, how: Pass, batch: Batch) -> int:
    """Beyond what is kept: without checkpointing the gradients through the last norm, in float32, or those in
    the midst of a layer; with it one layer computed again and its gradients, when the last norm is done."""
    gradients = _gradients(shape, how, batch)
    if not how.checkpointing:
        return max(5 * FLOAT32 * shape.hidden, gradients) * batch.tokens
    once = replace(how, checkpointing=False)
    again = gradients + how.compute * shape.mlp - _norm(shape.hidden, how, how.language == "full")
    return kept_by_layer(shape, once, batch) + again * batch.tokens


def _gradients(shape: Shape, how: Pass, batch: Batch) -> int:
    """Bytes a token of the gradients in the midst of a layer; adapters in float32 have theirs beside."""
    beside = FLOAT32 if how.language == "lora" and how.compute != FLOAT32 and not how.autocast else 0
    values = (how.compute + beside) * (2 * shape.hidden + shape.mlp)
    if how.attention != "eager":
        return values
    return max(values, shape.heads * batch.length * (FLOAT32 + how.compute))
