"""Settings of rollouts on a vLLM engine, under TRL's names, and of the watchdog over a run's stages."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from visor.config import Config


class EngineOptions(Config):
    use_vllm: bool = False
    """Sample rollouts, and validation, with vLLM instead of the policy's own copy in each process."""
    vllm_mode: Literal["colocate", "server"] = "colocate"
    """colocate: an engine in each process, beside the policy. server: one that `visor vllm-serve` runs
    elsewhere."""
    vllm_server_base_url: str | None = None
    """Of that server, for example http://127.0.0.1:8001."""
    vllm_server_timeout: float = Field(240.0, gt=0)
    """Seconds of one request to that server."""
    vllm_gpu_memory_utilization: float = Field(0.4, gt=0, le=1)
    """colocate: the engine's share of a GPU's memory, weights and key-value cache together. 0.4 as in VISOR's
    table 6; a CPU has VLLM_CPU_KVCACHE_SPACE instead."""
    vllm_tensor_parallel_size: int = Field(1, ge=1)
    """colocate: GPUs of the one process's engine. A server has its own setting."""
    vllm_max_model_length: int | None = Field(None, ge=2)
    """colocate: tokens of prompt and reply that the engine takes; null: the most that the settings lead to,
    as `--plan` prints it, within max_prompt_length + max_completion_length."""
    vllm_enable_sleep_mode: bool = False
    """colocate, GPU: the engine gives its memory back during updates."""
    max_train_inference_gap: float | None = Field(None, gt=0)
    """Mean |log p of the engine − log p of the trainer| over a fixed reply above which the run does not
    start; null: 0.001 in float32, 0.05 in bfloat16."""
    stage_timeout: float | None = Field(1800.0, gt=0)
    """Seconds without progress after which a stage counts as hanging: it is named on stderr, and the run ends
    with status 4. A model as judge has the time of its own retries if that is more; null: off."""

    @model_validator(mode="after")
    def _engine_is_consistent(self) -> Self:
        if not self.use_vllm:
            return self
        if self.vllm_mode == "colocate":
            if self.vllm_server_base_url is not None:
                raise ValueError(
                    "vllm_server_base_url is for vllm_mode server; set that, or leave the URL out"
                )
            return self
        if self.vllm_server_base_url is None:
            raise ValueError(
                "vllm_mode server needs vllm_server_base_url; start one with `visor vllm-serve MODEL`, which "
                "prints its address"
            )
        for name, default in (
            ("vllm_tensor_parallel_size", 1),
            ("vllm_max_model_length", None),
            ("vllm_enable_sleep_mode", False),
        ):
            if getattr(self, name) != default:
                raise ValueError(f"{name} is for vllm_mode colocate; give `visor vllm-serve` its own option")
        return self
