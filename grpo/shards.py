"""What each process keeps of a split training state: a folder below a checkpoint, every process its share."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate.utils import DistributedType

from grpo.launching import sharding_of
from grpo.planning.launch import NAMES


class Shards(Protocol):
    """Called on every process."""

    folder: str
    """Name of the folder below a checkpoint."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


def make_shards(accelerator, model, optimizer) -> Shards | None:
    """The shares of a run; None where the main process has the whole optimizer."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return DeepSpeedShards(model)
    if accelerator.distributed_type == DistributedType.FSDP:
        return FsdpShards(model, optimizer, accelerator.process_index)
    return None


class DeepSpeedShards:
    """DeepSpeed's own checkpoint: optimizer state and float32 weights."""

    folder = "deepspeed"

    def __init__(self, engine) -> None:
        self.engine = engine

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder), tag=self.folder)

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(str(folder), tag=self.folder)


class FsdpShards:
    """One file a process: its pieces of the trained weights, in the type they train in, and of the optimizer.

    PyTorch's distributed checkpoints would not give back the state of a run of which some parameters had no
    gradient yet: they make one up for every parameter before they read.
    """

    folder = "fsdp"

    def __init__(self, model, optimizer, process_index: int) -> None:
        self.model = model
        self.optimizer = optimizer
        self.file = f"process-{process_index}.pt"

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: _local(p.detach()) for name, p in self._trained()}
        torch.save({"weights": weights, "optimizer": _local(self.optimizer.state_dict())}, folder / self.file)

    def load(self, folder: Path) -> None:
        saved = torch.load(folder / self.file, map_location="cpu", weights_only=True)
        with torch.no_grad():
            for name, parameter in self._trained():
                _local(parameter.detach()).copy_(saved["weights"][name])
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        state = saved["optimizer"]
        for index, values in state["state"].items():
            for name, value in values.items():
                if name != "step":
                    values[name] = _like(value, parameters[index])
        self.optimizer.load_state_dict(state)

    def _trained(self):
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]


def _local(value: Any) -> Any:
    """This process's piece of every split tensor inside."""
    if isinstance(value, dict):
        return {key: _local(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_local(item) for item in value]
    return value.to_local() if hasattr(value, "to_local") else value


def _like(piece: torch.Tensor, parameter):
    """A piece as a tensor that is split as the parameter is."""
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return piece
    return DTensor.from_local(
        piece.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def check_fits_launch(state: dict, checkpoint: Path, accelerator) -> None:
    """ValueError when the optimizer state of a checkpoint is split in another way than this launch splits it.

    `state` is the checkpoint's `trainer_state.json`; one from before it said how is taken for one of this
    launch. Whole states (one process, data parallelism) go on on any number of processes.
    """
    now, processes = sharding_of(accelerator), accelerator.num_processes
    before, number = state.get("sharding", now), state.get("num_processes", processes)
    if before == now and (now == "none" or number == processes):
        return
    raise ValueError(
        f"{checkpoint} is of {_described(before, number)} and this launch has "
        f"{_described(now, processes)}: its optimizer state is split for another launch. Go on as it was "
        f"launched, or start a new run from its weights with model_name_or_path: {checkpoint} and another "
        "output_dir"
    )


def _described(sharding: str, processes: int) -> str:
    name = f" ({NAMES[sharding]})" if sharding in NAMES else ""
    return f"{processes} process{'es' if processes > 1 else ''}{name}"
