"""Two processes give the run of one: data parallelism, and DeepSpeed ZeRO-2 where it is installed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from training_world import grpo_settings, read_metrics, read_timeless, validating

DRIVER = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
if os.environ.get("ACCELERATE_USE_DEEPSPEED"):
    from accelerate import PartialState
    PartialState(backend="gloo")
import training_world
from grpo.arguments import GrpoConfig
from grpo.build import build_trainer
trainer = build_trainer(GrpoConfig(**json.loads(sys.argv[2])))
assert trainer.accelerator.num_processes == int(sys.argv[3])
scorer = getattr(training_world, os.environ.get("SCORER", "spread_reward"))
trainer.engine.scorer = scorer
if trainer.validation:
    trainer.validation.engine.scorer = scorer
trainer.train()
"""
DEEPSPEED = {
    "DS_ACCELERATOR": "cpu", "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
}  # fmt: skip


def launch(settings: dict, processes: int, tmp_path: Path, **environment: str) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    start = [sys.executable]
    if processes > 1:
        # A gloo process now and then aborts ("terminate called without an active exception"), which torchrun
        # takes for a failure. A restarted run goes on from its checkpoint and must give the same.
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        start += ["--max_restarts=2"]
    arguments = [str(script), str(Path(__file__).parent), json.dumps(settings), str(processes)]
    done = subprocess.run(
        start + arguments, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def same_within(one: Path, other: Path, tolerance: float) -> None:
    lines = [read_metrics(folder) for folder in (one, other)]
    if (one / "validation.jsonl").exists():
        for folder, read in zip((one, other), lines):
            read += read_timeless(folder / "validation.jsonl")
    for ours, theirs in zip(*lines, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            expected = theirs[name]
            expected = expected if expected is None else pytest.approx(expected, rel=1e-3, abs=1e-6)
            assert value == expected, name
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert max((ours[name] - theirs[name]).abs().max().item() for name in ours) < tolerance


def write_reading(folder: Path) -> str:
    """Auxiliary chats of unequal length, so that the processes' shares of the token mean differ."""
    lines = [
        {"messages": [{"role": "user", "content": "page"}, {"role": "assistant", "content": " apple" * n}]}
        for n in (1, 2, 7)
    ]
    path = folder / "reading.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["data parallel", "deepspeed"])
def test_two_processes_equal_one(kind, world, tmp_path):
    if kind == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    settings = {
        "beta": 0.1, "learning_rate": 3e-4, "per_device_train_batch_size": 2, "questions_per_step": 3,
        "auxiliary": {"path": write_reading(tmp_path), "weight": 0.5, "rows_per_step": 3},
        **validating(world, eval_steps=2, eval_limit=3, load_best_model_at_end=True),
    }  # fmt: skip
    environment = DEEPSPEED if kind == "deepspeed" else {"ACCELERATE_USE_CPU": "true"}
    launch(grpo_settings(world, tmp_path / "one", **settings), 1, tmp_path)
    launch(grpo_settings(world, tmp_path / "two", **settings), 2, tmp_path, **environment)
    # Adam turns rounding differences of tiny gradients into steps of up to a few thousandths of the rate.
    same_within(tmp_path / "one", tmp_path / "two", tolerance=1e-5)
    assert [line["step"] for line in read_timeless(tmp_path / "two" / "validation.jsonl")] == [2, 3]
    questions = [
        [json.loads(line)["question_id"] for line in (tmp_path / run / "validation" / "step-2.jsonl").open()]
        for run in ("one", "two")
    ]
    assert questions[0] == questions[1] == ["held-out-apple", "held-out-brick", "held-out-cloud"]
    assert (tmp_path / "two" / "best" / "best.json").read_text() == (
        tmp_path / "one" / "best" / "best.json"
    ).read_text()
    # A resumed pair of processes equals the unbroken pair to the last bit.
    for steps in (2, 3):
        resumed = grpo_settings(world, tmp_path / "resumed", **settings, max_steps=steps)
        launch(resumed, 2, tmp_path, **environment)
    same_within(tmp_path / "two", tmp_path / "resumed", tolerance=1e-12)


@pytest.mark.slow
def test_processes_with_unequal_rows_take_several_updates(world, tmp_path):
    """Three questions on two processes, no KL term: the process with fewer rows pads whole updates."""
    settings = grpo_settings(
        world, tmp_path / "run", questions_per_step=3, max_steps=2, gradient_accumulation_steps=1,
        per_device_train_batch_size=2, **validating(world, eval_limit=1),
    )  # fmt: skip
    launch(settings, 2, tmp_path, ACCELERATE_USE_CPU="true")
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
    environment = {"SCORER": "picky_reward", "ACCELERATE_USE_CPU": "true"}
    for name, processes in (("one", 1), ("two", 2)):
        launch(grpo_settings(world, tmp_path / name, **settings), processes, tmp_path, **environment)
    same_within(tmp_path / "one", tmp_path / "two", tolerance=1e-5)
    metrics = read_metrics(tmp_path / "two")
    assert any(line["resampling_rounds"] for line in metrics)
    assert {line["groups"] for line in metrics} > {2} or metrics[0]["groups"] > 2
    asked = [[samples(tmp_path / name, step) for step in (1, 2, 3, 4)] for name in ("one", "two")]
    assert asked[0] == asked[1]
    for steps in (2, 4):
        resumed = grpo_settings(world, tmp_path / "resumed", **{**settings, "max_steps": steps})
        launch(resumed, 2, tmp_path, **environment)
    same_within(tmp_path / "two", tmp_path / "resumed", tolerance=1e-12)


def samples(run: Path, step: int) -> list[tuple]:
    """(question, sample, what was sampled) of a step's trajectories."""
    records = [json.loads(line) for line in (run / "rollouts" / f"step-{step}.jsonl").open()]
    return sorted(
        (r["question_id"], r["sample_index"], [turn["completion"]["token_ids"] for turn in r["turns"]])
        for r in records
    )
