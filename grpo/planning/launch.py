"""On how many GPUs a run is launched and how they share it: from a file, the environment or options."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

Sharding = Literal["none", "zero0", "zero1", "zero2", "zero3", "fsdp", "fsdp_grad_op"]
"""none: whole copies (data parallel). zero0–zero3: stages of DeepSpeed ZeRO. fsdp: weights, gradients and
optimizer sharded. fsdp_grad_op: the weights only outside of updates."""

SPLIT_WEIGHTS: tuple[Sharding, ...] = ("zero3", "fsdp", "fsdp_grad_op")
"""No process holds the whole policy between steps. FSDP holds pieces even where it keeps the gathered weights
from a forward pass to its backward pass."""
NAMES = {
    "none": "data parallel",
    "zero0": "DeepSpeed ZeRO-0",
    "zero1": "DeepSpeed ZeRO-1",
    "zero2": "DeepSpeed ZeRO-2",
    "zero3": "DeepSpeed ZeRO-3",
    "fsdp": "FSDP, weights sharded",
    "fsdp_grad_op": "FSDP, weights gathered in updates",
}


@dataclass(frozen=True)
class Launch:
    world_size: int = 1
    """Processes, one a GPU."""
    sharding: Sharding = "none"
    bf16: bool = False
    """Mixed precision in bfloat16, asked for by the launch."""
    optimizer_on_cpu: bool = False
    weights_on_cpu: bool = False

    @property
    def name(self) -> str:
        if self.world_size == 1 and self.sharding == "none":
            return "1 process"
        offloaded = ", optimizer on the CPU" if self.optimizer_on_cpu else ""
        return f"{self.world_size} processes, {NAMES[self.sharding]}{offloaded}"

    @property
    def is_deepspeed(self) -> bool:
        return self.sharding.startswith("zero")

    @property
    def shards_weights(self) -> bool:
        return self.sharding in SPLIT_WEIGHTS


def find_launch(
    file: str | None = None,
    world_size: int | None = None,
    zero_stage: int | None = None,
    fsdp: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> Launch:
    """The launch of an `accelerate` file, or else of the process's environment (under `accelerate launch`);
    the options go over either. ValueError for a file that is not one and for options that contradict."""
    if zero_stage is not None and fsdp:
        raise ValueError("plan_zero_stage and plan_fsdp exclude each other: DeepSpeed or FSDP")
    launch = read_launch_file(Path(file)) if file else _from_environment(environment)
    if zero_stage is not None:
        launch = replace(launch, sharding=_zero(zero_stage))
    if fsdp:
        launch = replace(launch, sharding="fsdp")
    return launch if world_size is None else replace(launch, world_size=world_size)


def read_launch_file(path: Path) -> Launch:
    """Read the YAML of `accelerate launch --config_file`. ValueError when it is none."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"launch file {path} cannot be read: {error}") from error
    if not isinstance(values, dict) or "distributed_type" not in values:
        raise ValueError(f"launch file {path} has no distributed_type, so it is none of `accelerate config`")
    launch = Launch(
        world_size=int(values.get("num_processes") or 1),
        bf16=str(values.get("mixed_precision")) == "bf16",
    )
    kind = str(values["distributed_type"])
    if kind == "DEEPSPEED":
        return _deepspeed(launch, values.get("deepspeed_config") or {}, path.parent)
    if kind == "FSDP":
        settings = values.get("fsdp_config") or {}
        return _fsdp(launch, {name.removeprefix("fsdp_"): value for name, value in settings.items()})
    return launch


def _from_environment(environment: Mapping[str, str]) -> Launch:
    launch = Launch(
        world_size=int(environment.get("WORLD_SIZE", "1")),
        bf16=environment.get("ACCELERATE_MIXED_PRECISION") == "bf16",
    )
    if environment.get("ACCELERATE_USE_DEEPSPEED") == "true":
        prefix = "ACCELERATE_DEEPSPEED_"
        names = {"zero_stage": "ZERO_STAGE", "deepspeed_config_file": "CONFIG_FILE"}
        names |= {
            f"offload_{part}_device": f"OFFLOAD_{part.upper()}_DEVICE" for part in ("optimizer", "param")
        }
        given = {key: environment.get(prefix + name) for key, name in names.items()}
        return _deepspeed(launch, {key: value for key, value in given.items() if value}, Path())
    if environment.get("ACCELERATE_USE_FSDP") == "true":
        settings = ("sharding_strategy", "reshard_after_forward", "offload_params")
        found = {name: environment.get(f"FSDP_{name.upper()}") for name in settings}
        return _fsdp(launch, {name: value for name, value in found.items() if value})
    return launch


def _deepspeed(launch: Launch, settings: Mapping[str, Any], folder: Path) -> Launch:
    """From the `deepspeed_config` section, or the DeepSpeed JSON file it names."""
    file = settings.get("deepspeed_config_file")
    if file and str(file) != "none":
        settings = _deepspeed_json(Path(file) if Path(file).is_file() else folder / str(file))
    return replace(
        launch,
        sharding=_zero(int(settings.get("zero_stage", 2))),
        optimizer_on_cpu=str(settings.get("offload_optimizer_device", "none")) != "none",
        weights_on_cpu=str(settings.get("offload_param_device", "none")) != "none",
    )


def _deepspeed_json(path: Path) -> dict[str, Any]:
    try:
        zero = json.loads(path.read_text(encoding="utf-8")).get("zero_optimization", {})
    except (OSError, ValueError) as error:
        raise ValueError(f"DeepSpeed configuration {path} cannot be read: {error}") from error
    return {
        "zero_stage": zero.get("stage", 0),
        "offload_optimizer_device": zero.get("offload_optimizer", {}).get("device", "none"),
        "offload_param_device": zero.get("offload_param", {}).get("device", "none"),
    }


def _fsdp(launch: Launch, settings: Mapping[str, Any]) -> Launch:
    given = (settings.get(name) for name in ("sharding_strategy", "reshard_after_forward"))
    strategy = next((value for value in given if value is not None), "FULL_SHARD")
    keeps_weights = str(strategy).upper() in ("SHARD_GRAD_OP", "2", "FALSE")
    offloaded = str(settings.get("offload_params", "false")).lower() == "true"
    return replace(
        launch,
        sharding="fsdp_grad_op" if keeps_weights else "fsdp",
        optimizer_on_cpu=offloaded,
        weights_on_cpu=offloaded,
    )


def _zero(stage: int) -> Sharding:
    stages: dict[int, Sharding] = {0: "zero0", 1: "zero1", 2: "zero2", 3: "zero3"}
    if stage not in stages:
        raise ValueError(f"DeepSpeed ZeRO has the stages 0 to 3, not {stage}")
    return stages[stage]
