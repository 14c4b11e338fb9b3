"""The processes a run was launched on: what Accelerate is told, and how the training state is split."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from grpo.arguments import GrpoConfig
from grpo.planning.launch import NAMES, Sharding
from grpo.trackers import accelerator_arguments


def make_accelerator(config: GrpoConfig) -> Accelerator:
    """The Accelerator of a run, under whichever launcher. ValueError for a launch that cannot train."""
    if not torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        _start_cpu_processes()
    accelerator = Accelerator(
        mixed_precision="bf16" if config.bf16 else None,
        # A micro-batch without pictures leaves the vision tower without gradients.
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        **accelerator_arguments(config.report_to, Path(config.output_dir)),
    )
    if _asked_for("FSDP") and accelerator.distributed_type == DistributedType.MULTI_CPU:
        _shard_on_cpu(accelerator)
    check_launch(accelerator)
    if accelerator.state.deepspeed_plugin is not None:
        _set_up_deepspeed(accelerator.state.deepspeed_plugin, config)
    return accelerator


def sharding_of(accelerator) -> Sharding:
    """How the training state is split among the processes."""
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        stages: dict[int, Sharding] = {0: "zero0", 1: "zero1", 2: "zero2", 3: "zero3"}
        return stages[accelerator.state.deepspeed_plugin.zero_stage]
    if kind == DistributedType.FSDP:
        return "fsdp" if accelerator.state.fsdp_plugin.reshard_after_forward else "fsdp_grad_op"
    return "none"


def prepare(accelerator: Accelerator, model, optimizer) -> tuple:
    """`accelerator.prepare`, with what gloo needs beside it."""
    model, optimizer = accelerator.prepare(model, optimizer)
    if accelerator.distributed_type == DistributedType.FSDP and accelerator.device.type == "cpu":
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has sums, no means
    return model, optimizer


def check_launch(accelerator: Accelerator) -> None:
    """ValueError for a launch that cannot train this policy."""
    kind = accelerator.distributed_type
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise ValueError(
            f"{launched} processes were launched and each has found {accelerator.num_processes}, so they "
            "would write into one folder without knowing of each other; without a GPU launch them with a "
            "file for CPUs, as configs/accelerate/cpu2.yaml"
        )
    if kind == DistributedType.MEGATRON_LM:
        raise ValueError(
            "grpo.train does not run on Megatron-LM; launch it with data parallelism, "
            f"{NAMES['zero2']}, {NAMES['zero3']} or FSDP (configs/accelerate/)"
        )
    if kind == DistributedType.FSDP:
        plugin = accelerator.state.fsdp_plugin
        if plugin.fsdp_version != 2:
            raise ValueError(
                "grpo.train runs on FSDP version 2 only: its parameters keep their shapes and types, which "
                "frozen parts, adapters and checkpoints need; set fsdp_version: 2 in the launch file, as "
                "configs/accelerate/fsdp.yaml does"
            )
        if plugin.cpu_ram_efficient_loading:
            # The other processes would have no weights to make their sampling copy and reference from.
            plugin.cpu_ram_efficient_loading = False


def _asked_for(what: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{what}", "false").lower() == "true"


def _start_cpu_processes() -> None:
    """On machines without a GPU: for DeepSpeed Accelerate leaves the backend open, and DeepSpeed takes one
    that PyTorch does not have; for FSDP it does not pass a launch file's `use_cpu` on, and each process would
    be alone."""
    if _asked_for("DEEPSPEED"):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        PartialState(backend="gloo")
    elif _asked_for("FSDP"):
        os.environ["ACCELERATE_USE_CPU"] = "true"


def _set_up_deepspeed(plugin, config: GrpoConfig) -> None:
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    settings = plugin.deepspeed_config
    settings["train_micro_batch_size_per_gpu"] = config.per_device_train_batch_size
    settings["gradient_accumulation_steps"] = 1  # the loop counts for itself
    settings["gradient_clipping"] = config.max_grad_norm
    # Transformers would split every model it loads, the reference included. The policy is split afterwards.
    plugin.zero3_init_flag = False
    unset_hf_deepspeed_config()


def _shard_on_cpu(accelerator: Accelerator) -> None:
    """Accelerate knows FSDP on accelerators only. PyTorch's own runs on CPUs too, which is enough to try a
    launch file without a GPU."""
    state = accelerator.state
    state.fsdp_plugin = FullyShardedDataParallelPlugin()
    if state.mixed_precision != "no":
        state.fsdp_plugin.set_mixed_precision(state.mixed_precision)
    state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
