"""Configuration → the engine that a run samples from, and the clients on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor

from grpo.arguments import GrpoConfig
from grpo.engine_policy import EnginePolicy
from grpo.planning.engine import EngineLimits
from grpo.train_inference_gap import (
    REPLY_TOKENS,
    GapProbe,
    fixed_reply,
    probe_messages,
    tolerance_of,
)
from rollout.rows import TrainingRow
from visor.models.lora import base_model_of, is_adapter
from visor.models.sampling_engine import SamplingEngine
from visor.models.vllm import VLLMClient
from visor.types import Question

CPU_CACHE_BYTES = 1 << 29
"""Of keys and values, where there is no GPU and nothing is set."""


def open_engine(config: GrpoConfig, limits: EngineLimits, accelerator, dtype: torch.dtype) -> SamplingEngine:
    """The engine of this process, or the server's. ValueError for settings that it cannot keep, for a missing
    package and for a server that does not answer."""
    path = config.model_name_or_path
    if is_adapter(path):  # the engine has the architecture of the model below it
        path = base_model_of(path)
    if config.vllm_mode == "server":
        from visor.models.vllm_remote import RemoteEngine

        assert config.vllm_server_base_url is not None
        engine = RemoteEngine(
            config.vllm_server_base_url,
            path,
            max_context=limits.max_model_len,
            timeout=config.vllm_server_timeout,
            own_weights=False,  # the first push replaces whatever it has
        )
        _check_server(engine, limits)
        return engine
    from visor.models.vllm_engine import LocalEngine

    return LocalEngine(
        path,
        max_context=limits.max_model_len,
        max_images=limits.images,
        engine_args=engine_arguments(config, accelerator.num_processes, dtype),
    )


def engine_arguments(config: GrpoConfig, processes: int, dtype: torch.dtype) -> dict[str, Any]:
    """vLLM's own arguments of a colocated engine. ValueError for what a colocated one cannot do here."""
    arguments: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "tensor_parallel_size": config.vllm_tensor_parallel_size,
        "seed": config.seed,
    }
    if processes > 1:
        if config.vllm_tensor_parallel_size > 1:
            raise ValueError(
                f"vllm_tensor_parallel_size {config.vllm_tensor_parallel_size} in {processes} processes: a "
                "colocated engine belongs to one process, and the others' GPUs have engines of their own; "
                "vllm_mode server has an engine over several GPUs"
            )
        # The processes are there already: an engine is to join its own and start none.
        arguments["distributed_executor_backend"] = "external_launcher"
    if torch.cuda.is_available():
        arguments["gpu_memory_utilization"] = config.vllm_gpu_memory_utilization
        arguments["enable_sleep_mode"] = config.vllm_enable_sleep_mode
        return arguments
    if config.vllm_enable_sleep_mode:
        raise ValueError(
            "vllm_enable_sleep_mode gives a GPU's memory back during updates, and there is no GPU here"
        )
    # On a CPU an engine is for trying things out: compiling would take longer than sampling.
    arguments["enforce_eager"] = True
    if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        arguments["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
    return arguments


def _check_server(engine: SamplingEngine, limits: EngineLimits) -> None:
    if engine.max_context < limits.max_model_len or engine.max_images < limits.images:
        raise ValueError(
            f"the server takes {engine.max_context:,} tokens and {engine.max_images} images, and this run "
            f"needs {limits.max_model_len:,} tokens of prompt and reply and {limits.images} images; start it "
            f"with --max-context {limits.max_model_len} --max-images {limits.images}"
        )


def engine_policy(
    config: GrpoConfig,
    clients: Sequence[VLLMClient],
    model,
    accelerator,
    question: Question,
    collate: Callable[[Sequence[TrainingRow]], dict[str, Tensor]],
) -> EnginePolicy:
    """What keeps the engine of `clients`, the training client first, at `model`. The gap is measured on
    `question`."""
    client, output_dir = clients[0], Path(config.output_dir)

    def make_probe() -> GapProbe:
        tokens = min(REPLY_TOKENS, config.max_completion_length)
        messages = probe_messages(question, config.episode, client, tokens)
        ids: list[int] = []
        if accelerator.is_main_process:
            ids = fixed_reply(output_dir, client, messages, tokens)
        return GapProbe(client, model, collate, messages, broadcast_object_list([ids])[0])

    return EnginePolicy(
        client.engine,
        clients,
        model,
        accelerator,
        owns_engine=config.vllm_mode == "colocate",
        tolerance=config.max_train_inference_gap or tolerance_of(engine_type(config, model)),
        make_probe=make_probe,
        sleeps=config.vllm_enable_sleep_mode,
    )


def engine_type(config: GrpoConfig, model) -> torch.dtype:
    """What the engine computes in: as the trainer does."""
    return torch.bfloat16 if config.bf16 else next(iter(model.parameters())).dtype
