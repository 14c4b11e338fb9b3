"""Two processes give the run of one: data parallelism, FSDP, and DeepSpeed ZeRO where it is installed."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_world import grpo_settings, read_metrics, read_timeless, validating
from transformers import Qwen2_5_VLForConditionalGeneration

from visor.types import make_page_id

DRIVER = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import torch
import training_world
from grpo.arguments import GrpoConfig
from pathlib import Path
from grpo.build import build_trainer
from grpo.leaving import leave
from grpo.policy_push import full_parameters
from visor.models.loading import load_model
def run():
    config = GrpoConfig(**json.loads(sys.argv[2]))
    trainer = build_trainer(config)
    assert trainer.accelerator.num_processes == int(sys.argv[3])
    split = sys.argv[4] in ("zero3", "fsdp")
    assert trainer.policy.is_split == split
    if split and trainer.step_done == 0:
        whole = dict(load_model(config.model_name_or_path).named_parameters())
        for name, tensor in full_parameters(trainer.model):
            assert torch.equal(tensor, whole.pop(name)), name
        assert not whole
        held = sum(parameter.numel() for parameter in trainer.policy.model.parameters())
        assert held == 0, "the copy that samples is gone between rollouts"
    scorer = getattr(training_world, os.environ.get("SCORER", "spread_reward"))
    trainer.engine.scorer = scorer
    if trainer.validation:
        trainer.validation.engine.scorer = scorer
    trainer.train()
run()
leave(0)
"""
CPU = {"ACCELERATE_USE_CPU": "true"}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}
KINDS = {
    "data parallel": CPU,
    "zero2": {**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    "zero3": DEEPSPEED,  # and a file of its own
    "fsdp": {
        **CPU, "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    },
}  # fmt: skip
ZERO3 = {
    "zero_optimization": {
        "stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 1000,
        "stage3_max_live_parameters": 30000, "reduce_bucket_size": 20000,
    },
    "train_micro_batch_size_per_gpu": 1,
}  # fmt: skip
"""Buckets so small that the tiny policy is split and gathered in many pieces, as a large one is."""


def launch(settings: dict, kind: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess:
    """Train on one process ("one") or on two that share the state in the way of `kind`."""
    if kind.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    start, processes = [sys.executable], 1
    if kind != "one":
        processes = 2
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        environment |= KINDS[kind]
    if kind == "zero3":
        (tmp_path / "zero3.json").write_text(json.dumps(ZERO3))
        environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(tmp_path / "zero3.json")
    arguments = [str(script), str(Path(__file__).parent), json.dumps(settings), str(processes), kind]
    return subprocess.run(
        start + arguments, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


def train(settings: dict, kind: str, tmp_path: Path, **environment: str) -> None:
    done = launch(settings, kind, tmp_path, **environment)
    assert done.returncode == 0, done.stderr[-3000:]


def same_within(one: Path, other: Path, tolerance: float) -> None:
    lines = [read_metrics(folder) for folder in (one, other)]
    if (one / "validation.jsonl").exists():
        for folder, read in zip((one, other), lines):
            read += read_timeless(folder / "validation.jsonl")
    for ours, theirs in zip(*lines, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            if name == "padding_share":  # two processes have other batches
                continue
            expected = theirs[name]
            expected = expected if expected is None else pytest.approx(expected, rel=1e-3, abs=1e-6)
            assert value == expected, name
    ours, theirs = (load_file(folder / weights_file(folder)) for folder in (one, other))
    assert max((ours[name] - theirs[name]).abs().max().item() for name in ours) < tolerance


def weights_file(folder: Path) -> str:
    adapter = "adapter_model.safetensors"
    return adapter if (folder / adapter).exists() else "model.safetensors"


def write_reading(folder: Path) -> str:
    """Auxiliary chats of unequal length, one of them with a picture: the processes' shares of the token mean
    differ, and so does what their micro-batches run."""
    page = {"page_id": make_page_id("deck", 1), "min_pixels": 56 * 56, "max_pixels": 56 * 56}
    lines = [
        {
            "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": " apple" * n}],
            "images": images,
        }
        for n, text, images in ((1, "page <image>", [page]), (2, "page", []), (7, "page", []))
    ]
    path = folder / "reading.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


RUN = {
    "beta": 0.1, "learning_rate": 3e-4, "lr_scheduler_type": "linear", "per_device_train_batch_size": 2,
    "questions_per_step": 3, "save_steps": 2,
}  # fmt: skip


def run_settings(world: Path, folder: Path, output: str, **settings) -> dict:
    """KL, an auxiliary loss and validation, on uneven shares of everything."""
    auxiliary = {"path": write_reading(folder), "weight": 0.5, "rows_per_step": 2}
    validation = validating(world, eval_steps=2, eval_limit=3, load_best_model_at_end=True)
    return grpo_settings(world, folder / output, **{**RUN, "auxiliary": auxiliary, **validation, **settings})


@pytest.fixture(scope="module")
def one_process(world, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    train(run_settings(world, folder, "one"), "one", folder)
    return folder / "one"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_equal_one(kind, world, one_process, tmp_path):
    settings = run_settings(world, tmp_path, "two")
    train(settings, kind, tmp_path)
    two = tmp_path / "two"
    # Adam turns rounding differences of tiny gradients into steps of up to a few thousandths of the rate.
    same_within(one_process, two, tolerance=1e-5)
    assert [line["step"] for line in read_timeless(two / "validation.jsonl")] == [2, 3]
    questions = [
        [json.loads(line)["question_id"] for line in (run / "validation" / "step-2.jsonl").open()]
        for run in (one_process, two)
    ]
    assert questions[0] == questions[1] == ["held-out-apple", "held-out-brick", "held-out-cloud"]
    assert (two / "best" / "best.json").read_text() == (one_process / "best" / "best.json").read_text()
    loaded = Qwen2_5_VLForConditionalGeneration.from_pretrained(two / "checkpoint-3", dtype="auto")
    assert loaded.dtype == torch.float32
    # A resumed pair of processes equals the unbroken pair to the last bit.
    shutil.copytree(two, tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoint-3")
    train({**settings, "output_dir": str(tmp_path / "resumed")}, kind, tmp_path)
    same_within(two, tmp_path / "resumed", tolerance=1e-12)
    if kind == "data parallel":
        return
    alone = launch({**settings, "max_steps": 4}, "one", tmp_path)
    assert alone.returncode != 0
    assert "this launch has 1 process (data parallel)" in alone.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zero3", "fsdp"])
def test_a_process_without_rows(kind, world, tmp_path):
    """One question for two processes, scored before its updates and updated twice on it: one process has
    padding alone, in the forward passes without gradient too."""
    settings = {
        "questions_per_step": 1,
        "num_iterations": 2,
        "per_device_train_batch_size": 1,
        "max_steps": 2,
    }
    for name in ("one", kind):
        train(run_settings(world, tmp_path, name, **settings), name, tmp_path)
    same_within(tmp_path / "one", tmp_path / kind, tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zero3", "fsdp"])
def test_adapters_under_split_weights(kind, world, tmp_path):
    settings = {"use_peft": True, "lora_r": 4, "learning_rate": 3e-3}
    for name in ("one", kind):
        train(run_settings(world, tmp_path, name, **settings), name, tmp_path)
    same_within(tmp_path / "one", tmp_path / kind, tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zero2", "zero3", "fsdp"])
def test_frozen_parts_under_every_kind(kind, world, tmp_path):
    """Vision tower and projector frozen: they run, nothing of them moves."""
    settings = {"freeze": ["vision_tower", "projector"], "max_steps": 2}
    for name in ("one", kind):
        train(run_settings(world, tmp_path, name, **settings), name, tmp_path)
    same_within(tmp_path / "one", tmp_path / kind, tolerance=1e-5)
    start, end = (load_file(folder / "model.safetensors") for folder in (world / "policy", tmp_path / kind))
    moved = {name for name in start if not torch.equal(start[name], end[name])}
    assert moved
    assert not any("visual" in name for name in moved)


@pytest.mark.slow
def test_processes_with_unequal_rows_take_several_updates(world, tmp_path):
    """Three questions on two processes, no KL term: the process with fewer rows pads whole updates."""
    settings = grpo_settings(
        world, tmp_path / "run", questions_per_step=3, max_steps=2, gradient_accumulation_steps=1,
        per_device_train_batch_size=2, **validating(world, eval_limit=1),
    )  # fmt: skip
    train(settings, "data parallel", tmp_path)
    metrics = read_metrics(tmp_path / "run")
    assert [line["rows"] for line in metrics] == [9, 9]
    assert all(line["grad_norm"] > 0 for line in metrics)


@pytest.mark.slow
def test_two_processes_resample_the_same_questions_as_one(world, tmp_path):
    """Rounds of one or two questions for two processes: one often has nothing to do, and none hangs."""
    settings = {
        "filter_zero_std_groups": True, "max_resampling_rounds": 3, "questions_per_step": 2, "max_steps": 4,
        "save_steps": 2, "scale_rewards": "batch", "per_device_train_batch_size": 2,
    }  # fmt: skip
    for name, kind in (("one", "one"), ("two", "data parallel")):
        train(grpo_settings(world, tmp_path / name, **settings), kind, tmp_path, SCORER="picky_reward")
    same_within(tmp_path / "one", tmp_path / "two", tolerance=1e-5)
    metrics = read_metrics(tmp_path / "two")
    assert any(line["resampling_rounds"] for line in metrics)
    assert {line["groups"] for line in metrics} > {2} or metrics[0]["groups"] > 2
    asked = [[samples(tmp_path / name, step) for step in (1, 2, 3, 4)] for name in ("one", "two")]
    assert asked[0] == asked[1]
    for steps in (2, 4):
        resumed = grpo_settings(world, tmp_path / "resumed", **{**settings, "max_steps": steps})
        train(resumed, "data parallel", tmp_path, SCORER="picky_reward")
    same_within(tmp_path / "two", tmp_path / "resumed", tolerance=1e-12)


def samples(run: Path, step: int) -> list[tuple]:
    """(question, sample, what was sampled) of a step's trajectories."""
    records = [json.loads(line) for line in (run / "rollouts" / f"step-{step}.jsonl").open()]
    return sorted(
        (r["question_id"], r["sample_index"], [turn["completion"]["token_ids"] for turn in r["turns"]])
        for r in records
    )
