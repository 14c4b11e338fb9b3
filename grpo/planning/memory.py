"""Memory of one GPU: what stays the whole run, what an update needs beside it, and what rollouts need.

Sharding follows the ZeRO paper (Rajbhandari et al. 2020, section 3): with mixed-precision Adam a parameter
takes 2 bytes of weight, 2 of gradient and 12 of optimizer (float32 master weight and two moments). Stage 1
divides the last among the processes, stage 2 the gradients too, stage 3 the weights too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from grpo.planning.activations import FLOAT32, Batch, Pass, Shape, peak, seeing
from grpo.planning.launch import Launch
from grpo.planning.model import Parameters

GIB = 1 << 30
RUNTIME = 3 * GIB // 2
"""Assumed: CUDA context, cuBLAS workspaces, NCCL's buffers and what the allocator cannot reuse."""
DEEPSPEED_BUCKET = 500_000_000
"""Elements: DeepSpeed's default `reduce_bucket_size`."""
LIVE_PARAMETERS = 1_000_000_000
"""DeepSpeed's default `stage3_max_live_parameters`."""
FEATURE_CACHE = 1 << 30
"""Bytes of image features that `TransformersClient` keeps of a frozen vision tower at most."""
CACHE_ROOM = 64
"""Positions by which the key-value cache grows at a time (`visor.models.decoding.GROWTH`)."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    weights: int
    optimizer: int
    reference: int
    gradients: int
    """During an update only."""
    communication: int
    """Buffers of gradients and gathered weights between processes."""
    activations: int
    """The most at once in an update."""
    cache: int
    """Keys and values of a rollout's sequences."""
    sampling: int
    """The most that reading prompts needs beside them."""
    features: int
    """Image features kept between calls, at most."""
    gathered: int
    """The whole copy of split weights that rollouts sample from, in the type the policy was loaded in."""
    runtime: int = RUNTIME
    engine: int = 0
    """A colocated engine's share while it samples, its weights and key-value cache included."""
    engine_update: int = 0
    """The same during an update: nothing while it sleeps."""

    @property
    def stays(self) -> int:
        return self.weights + self.optimizer + self.reference + self.features + self.runtime

    @property
    def update(self) -> int:
        return self.stays + self.gradients + self.communication + self.activations + self.engine_update

    @property
    def rollout(self) -> int:
        return self.stays + self.gathered + self.cache + self.sampling + self.engine

    @property
    def peak(self) -> int:
        return max(self.update, self.rollout)

    def lines(self) -> list[tuple[str, int]]:
        """(name, bytes) of each part, an engine's once and only where there is one."""
        parts = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [part for part in parts if part[0] != "engine_update" and part != ("engine", 0)]


@dataclass(frozen=True)
class Static:
    """Weights, gradients, optimizer and buffers of one process, bytes."""

    weights: int
    gradients: int
    optimizer: int
    communication: int
    gathered: int


def static_memory(parameters: Parameters, launch: Launch, *, bf16: bool) -> Static:
    """The parts that follow from the parameters alone. `bf16`: mixed precision."""
    if launch.is_deepspeed:
        return _deepspeed(parameters, launch, bf16)
    if launch.sharding in ("fsdp", "fsdp_grad_op"):
        return _fsdp(parameters, launch, bf16)
    # AdamW's two moments have the type of their parameter; its step count is a float32 a tensor.
    optimizer = 2 * parameters.trained_bytes + FLOAT32 * parameters.trained_tensors
    # DistributedDataParallel copies gradients into buckets of their own.
    buckets = parameters.trained_bytes if launch.world_size > 1 else 0
    return Static(parameters.bytes, parameters.trained_bytes, optimizer, buckets, 0)


def _deepspeed(parameters: Parameters, launch: Launch, bf16: bool) -> Static:
    """DeepSpeed turns the whole model into bfloat16 and keeps float32 master weights with the moments."""
    size, stage = launch.world_size, int(launch.sharding[-1])
    each = 2 if bf16 else FLOAT32
    weights = each * parameters.trained + min(each * parameters.frozen, parameters.frozen_bytes)
    optimizer = 3 * FLOAT32 * parameters.trained
    gradients = (FLOAT32 if stage == 0 else each) * parameters.trained
    bucket = each * min(DEEPSPEED_BUCKET, parameters.trained) if stage else gradients
    if stage == 3:
        bucket += each * min(LIVE_PARAMETERS, parameters.number)
    return Static(
        weights=0 if launch.weights_on_cpu else weights // (size if stage == 3 else 1),
        gradients=gradients // (size if stage >= 2 else 1),
        optimizer=0 if launch.optimizer_on_cpu else optimizer // (size if stage >= 1 else 1),
        communication=bucket,
        gathered=parameters.bytes if stage == 3 else 0,
    )


def _fsdp(parameters: Parameters, launch: Launch, bf16: bool) -> Static:
    """Accelerate holds the trained parameters in float32 under mixed precision; layers are gathered in the
    type they compute in, two at a time, beside what lies outside the layers; all of them without resharding
    after the forward pass."""
    size = launch.world_size
    trained = FLOAT32 * parameters.trained if bf16 else parameters.trained_bytes
    whole = trained + parameters.frozen_bytes
    each = 2 if bf16 else max(parameters.bytes // parameters.number, 1)
    sharded = launch.sharding == "fsdp"
    live = each * parameters.number
    if sharded:
        live = each * (2 * parameters.largest_layer + parameters.outside_layers)
    return Static(
        weights=0 if launch.weights_on_cpu else whole // size,
        gradients=trained // size,
        optimizer=0 if launch.optimizer_on_cpu else 2 * trained // size,
        communication=live + 2 * each * parameters.largest_layer,
        gathered=parameters.bytes,
    )


@dataclass(frozen=True)
class RolloutBatch:
    """The largest batch of replies."""

    sequences: int
    prompt: int
    """Tokens of the longest prompt."""
    reply: int
    """Tokens of the longest reply."""
    visual: int
    """Image tokens of that prompt."""


def cache_bytes(shape: Shape, batch: RolloutBatch, each: int) -> int:
    """Keys and values, `each` bytes a value, padded to the longest prompt: all layers, and the copy of one
    that is made when its buffer grows."""
    positions = batch.prompt + batch.reply + CACHE_ROOM
    return 2 * shape.keys * each * positions * batch.sequences * (shape.layers + 1)


def sampling_bytes(shape: Shape, batch: RolloutBatch, each: int) -> int:
    """The most that prompts or images need while they are read, `each` bytes a value."""
    tokens = batch.sequences * batch.prompt
    masked = (
        tokens * batch.prompt * (1 + each) if batch.sequences > 1 else 0
    )  # prompts are padded on the left
    language = tokens * each * (3 * shape.mlp + 4 * shape.hidden) + masked
    vision = seeing(shape, each, 4 * batch.visual * batch.sequences)
    features = batch.sequences * batch.visual * shape.hidden * each
    logits = batch.sequences * shape.vocabulary * 4 * FLOAT32
    return max(language + features, vision) + logits


def estimate(
    shape: Shape,
    how: Pass,
    parameters: Parameters,
    launch: Launch,
    batch: Batch,
    rollouts: RolloutBatch,
    *,
    bf16: bool,
    reference: int,
) -> Memory:
    """Memory of one GPU. `reference`: bytes of what the KL term compares with."""
    static = static_memory(parameters, launch, bf16=bf16)
    each = how.weights
    return Memory(
        weights=static.weights,
        optimizer=static.optimizer,
        reference=reference,
        gradients=static.gradients,
        communication=static.communication,
        activations=peak(shape, how, batch),
        cache=cache_bytes(shape, rollouts, each),
        sampling=sampling_bytes(shape, rollouts, each),
        features=0 if how.vision or how.projector else FEATURE_CACHE,
        gathered=static.gathered,
    )
