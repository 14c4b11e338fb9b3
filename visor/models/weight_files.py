"""The weights of a model on their way into an engine: what must come, and files of bounded size."""

from __future__ import annotations

import hashlib
import os
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
SAMPLES, SAMPLE_BYTES = 64, 1 << 16
"""How much of a weight file a checkpoint's fingerprint reads."""
STAGING = "visor-weights-"
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


def check_shapes(shapes: Iterable[tuple[str, tuple[int, ...]]], expected: Expected) -> None:
    """ValueError unless these are all weights, each once, in their shapes."""
    given = list(shapes)
    check_names((name for name, _ in given), expected)
    for name, shape in given:
        _check_shape(name, shape, expected)


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
                f"weights {what}: {first}{more}; an engine takes all weights of the state dict at once"
            )


def checked_weights(weights: Weights, expected: Expected) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights one after the other, detached; tied weights under both names, because an engine that packs
    a layer's weight anew does so only for a layer that is given one. ValueError for an unknown name or a
    wrong shape when it comes, and at the end for one that is missing."""
    names = []
    shared: torch.Tensor | None = None
    for name, weight in weights:
        _check_shape(name, tuple(weight.shape), expected)
        names.append(name)
        if not (expected.tied and name in TIED):
            yield name, weight.detach()
        elif shared is None:
            shared = weight.detach()
            yield from ((each, shared) for each in sorted(TIED))
        elif not torch.equal(shared, weight.detach()):
            raise ValueError("the weights of embeddings and output layer differ, but the model ties them")
    check_names(names, expected)


def _check_shape(name: str, shape: tuple[int, ...], expected: Expected) -> None:
    if name not in expected.shapes:
        raise ValueError(f"weights unknown: {name}; the names are those of the model's state dict")
    if shape != expected.shapes[name]:
        raise ValueError(f"weight {name} has the shape {shape}, not {expected.shapes[name]}")


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

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of each weight, from the headers alone."""
        from safetensors import safe_open

        for path in self.paths:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    yield name, tuple(file.get_slice(name).get_shape())


def checkpoint_fingerprint(path: str | Path) -> str:
    """A hash that tells checkpoints apart: names, sizes and samples of the weight files of a folder or of a
    cached hub model. ValueError when there are none."""
    from visor.models.hub import cached_folder

    folder = Path(path) if Path(path).is_dir() else cached_folder(str(path))
    files = sorted(folder.glob("*.safetensors")) if folder else []
    if not files:
        raise ValueError(f"{path}: there are no weights (*.safetensors)")
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            for number in range(SAMPLES):
                stream.seek(size * number // SAMPLES)
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


@contextmanager
def staging_folder(size: int = 0) -> Iterator[Path]:
    """A new folder for weight files of `size` bytes in all, in shared memory where that has room for them;
    removed at the end. What processes that were killed left behind goes first."""
    fits = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > size * 1.1
    parent = SHARED_MEMORY if fits else Path(tempfile.gettempdir())
    remove_orphans(parent)
    folder = Path(tempfile.mkdtemp(prefix=f"{STAGING}{os.getpid()}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_orphans(parent: Path) -> None:
    """Remove staging folders whose process has gone: gigabytes of memory, where a push was under way."""
    for folder in parent.glob(f"{STAGING}*"):
        pid = folder.name.removeprefix(STAGING).partition("-")[0]
        if pid.isdigit() and not _runs(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


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
