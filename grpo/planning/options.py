"""Options of `--plan`: how a run is meant to be launched, and what its typical episode is taken to be."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from grpo.arguments import GrpoConfig
from visor.config import Config


class PlanOptions(Config):
    plan: bool = False
    """Print the longest context, rows, tokens and memory that these settings lead to, and stop; exit status 2
    when they exceed a limit. Needs no weights."""
    plan_launch_file: str | None = None
    """The file of `accelerate launch --config_file`; null: the launch this command itself runs under."""
    plan_world_size: int | None = Field(None, ge=1)
    """GPUs; null: those of the launch."""
    plan_zero_stage: int | None = Field(None, ge=0, le=3)
    """Stage of DeepSpeed ZeRO; null: that of the launch."""
    plan_fsdp: bool = False
    """Shard weights, gradients and optimizer with FSDP."""
    plan_device_gib: float | None = Field(None, gt=0)
    """Memory of a GPU in GiB; null: that of the GPU that is here, if there is one."""
    plan_turns: int = Field(5, ge=1)
    """Policy calls of a typical episode; max_turns when that is less."""
    plan_reply_tokens: int = Field(150, ge=1)
    """Tokens of a typical reply; max_completion_length when that is less."""
    plan_must_fit: Literal["longest", "typical"] = "longest"
    """The rows that have to fit into memory and `max_length`: the longest ones, or only the typical ones."""


class TrainCommand(PlanOptions, GrpoConfig):
    """The command line of `grpo.train`: the settings of a run, and the options of its plan."""

    @property
    def settings(self) -> GrpoConfig:
        """The settings of the run alone."""
        return GrpoConfig(**{name: getattr(self, name) for name in GrpoConfig.model_fields})
