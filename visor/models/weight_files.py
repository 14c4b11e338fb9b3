"""The weights of a model on their way into an engine: what must come, and safetensors files of bounded size."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

BUCKET_BYTES = 256 << 20
SHARED_MEMORY = Path("/dev/shm")
TIED = frozenset({"model.language_model.embed_tokens.weight", "lm_head.weight"})
"""The two names of one weight in a model with tied embeddings."""

Weights = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Expected:
    """The weights of a checkpoint."""

    shapes: Mapping[str, tuple[int, ...]]
    """By name in the state dict of `Qwen2_5_VLForConditionalGeneration`."""
    tied: bool
    """Whether the output layer shares the weight of the embeddings; either name may then be left out."""


def expected_weights(config: Any) -> Expected:
    """Names and shapes of the weights of a `Qwen2_5_VLConfig`; nothing of their size is allocated."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return Expected(shapes, tied=model.lm_head.weight is model.get_input_embeddings().weight)


def check_names(names: Iterable[str], expected: Expected) -> None:
    """ValueError unless `names` are all weights, each once."""
    given = Counter(names)
    repeated = [name for name, times in given.items() if times > 1]
    missing = expected.shapes.keys() - given.keys()
    if expected.tied and not missing >= TIED:
        missing -= TIED
    unknown = given.keys() - expected.shapes.keys()
    for what, found in (("missing", missing), ("unknown", unknown), ("given twice", repeated)):
        if found:
            first = ", ".join(sorted(found)[:3])
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            raise ValueError(
                f"weights {what}: {first}{more}; an engine takes all weights of the model's state dict at once"
            )


def checked_weights(weights: Weights, expected: Expected) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights one after the other, detached; tied weights under both names, because an engine that packs
    a layer's weight anew does so only for a layer that is given one. ValueError for an unknown name or a
    wrong shape when it comes, and at the end for one that is missing."""
    names = []
    for name, weight in weights:
        shape = expected.shapes.get(name)
        if shape is None:
            raise ValueError(f"weights unknown: {name}; the names are those of the model's state dict")
        if tuple(weight.shape) != shape:
            raise ValueError(f"weight {name} has the shape {tuple(weight.shape)}, not {shape}")
        names.append(name)
        if not (expected.tied and name in TIED):
            yield name, weight.detach()
        elif not TIED & set(names[:-1]):
            for each in sorted(TIED):
                yield each, weight.detach()
    check_names(names, expected)


def buckets(weights: Weights, size: int = BUCKET_BYTES) -> Iterator[dict[str, torch.Tensor]]:
    """Weights in groups of at most `size` bytes; a larger weight is a group of its own."""
    bucket: dict[str, torch.Tensor] = {}
    filled = 0
    for name, weight in weights:
        if bucket and filled + weight.nbytes > size:
            yield bucket
            bucket, filled = {}, 0
        # Tied weights share memory, which safetensors refuses within one file.
        bucket[name] = weight.detach().cpu().contiguous().clone()
        filled += weight.nbytes
    if bucket:
        yield bucket


@dataclass(frozen=True)
class WeightFiles:
    """Weights in safetensors files; iterating reads one tensor at a time."""

    paths: Sequence[str | Path]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        from safetensors import safe_open

        for path in self.paths:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118, a safetensors file is no dictionary
                    yield name, file.get_tensor(name)


@contextmanager
def staging_folder(size: int = 0) -> Iterator[Path]:
    """A new folder for weight files of `size` bytes in all, in shared memory where that has room for them;
    removed at the end."""
    fits = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > size * 1.1
    folder = Path(tempfile.mkdtemp(prefix="visor-weights-", dir=SHARED_MEMORY if fits else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def written_weights(weights: Weights, size: int = 0) -> Iterator[WeightFiles]:
    """The weights as files that worker processes can read, for as long as the block runs."""
    from safetensors.torch import save_file

    with staging_folder(size) as folder:
        paths = []
        for number, bucket in enumerate(buckets(weights)):
            paths.append(folder / f"{number}.safetensors")
            save_file(bucket, paths[-1])
        yield WeightFiles(paths)
