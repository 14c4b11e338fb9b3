"""Launch files, the environment of `accelerate launch` and the options over both."""

import json
from pathlib import Path

import pytest

from grpo.planning.launch import Launch, find_launch, read_launch_file

LAUNCHES = Path(__file__).parents[2] / "configs" / "accelerate"


def test_the_shipped_launch_files():
    assert read_launch_file(LAUNCHES / "zero2.yaml") == Launch(8, "zero2", bf16=True)
    assert read_launch_file(LAUNCHES / "zero3.yaml") == Launch(8, "zero3", bf16=True)
    assert read_launch_file(LAUNCHES / "fsdp.yaml") == Launch(8, "fsdp", bf16=True)
    assert read_launch_file(LAUNCHES / "cpu2_fsdp.yaml") == Launch(2, "fsdp", bf16=False)
    assert read_launch_file(LAUNCHES / "gpu8.yaml") == Launch(8, "none", bf16=True)
    assert read_launch_file(LAUNCHES / "cpu2.yaml") == Launch(2, "none", bf16=False)


def test_deepspeed_with_a_file_of_its_own(tmp_path):
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "none"}}
    (tmp_path / "zero3.json").write_text(json.dumps({"zero_optimization": zero}))
    path = tmp_path / "launch.yaml"
    path.write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 4\n"
        "deepspeed_config: {deepspeed_config_file: zero3.json}\n"
    )
    assert read_launch_file(path) == Launch(4, "zero3", optimizer_on_cpu=True)


@pytest.mark.parametrize(
    ("settings", "sharding"),
    [
        ("{}", "fsdp"),
        ("{fsdp_sharding_strategy: FULL_SHARD}", "fsdp"),
        ("{fsdp_sharding_strategy: SHARD_GRAD_OP}", "fsdp_grad_op"),
        ("{fsdp_version: 2, fsdp_reshard_after_forward: true}", "fsdp"),
        ("{fsdp_version: 2, fsdp_reshard_after_forward: false}", "fsdp_grad_op"),
    ],
)
def test_fsdp(tmp_path, settings, sharding):
    path = tmp_path / "launch.yaml"
    path.write_text(f"distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {settings}\n")
    assert read_launch_file(path).sharding == sharding


def test_the_environment_of_a_launch():
    assert find_launch(environment={}) == Launch()
    deepspeed = {
        "WORLD_SIZE": "8",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": "none",
    }
    assert find_launch(environment=deepspeed) == Launch(8, "zero1", bf16=True)
    fsdp = {"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true", "FSDP_RESHARD_AFTER_FORWARD": "false"}
    assert find_launch(environment=fsdp) == Launch(2, "fsdp_grad_op")


def test_options_go_over_file_and_environment():
    file = str(LAUNCHES / "zero2.yaml")
    assert find_launch(file, world_size=16, environment={"WORLD_SIZE": "3"}).world_size == 16
    assert find_launch(file, zero_stage=3).sharding == "zero3"
    assert find_launch(world_size=2, fsdp=True, environment={}).sharding == "fsdp"
    with pytest.raises(ValueError, match="DeepSpeed or FSDP"):
        find_launch(zero_stage=2, fsdp=True)


def test_a_file_that_is_none(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.yaml cannot be read"):
        find_launch(str(tmp_path / "nowhere.yaml"))
    path = tmp_path / "other.yaml"
    path.write_text("model_name_or_path: x\n")
    with pytest.raises(ValueError, match="no distributed_type"):
        find_launch(str(path))
