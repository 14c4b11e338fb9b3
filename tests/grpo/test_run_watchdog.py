"""The watchdog over a training run: what hangs is named, the run ends, and its records stay good."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training_world import grpo_settings, read_metrics, trainer_for, validating

from grpo.arguments import GrpoConfig
from grpo.heartbeats import Heartbeats
from grpo.watch import run_watchdog
from visor.watchdog import STATUS

DRIVER = """
import json, os, sys, threading
sys.path.insert(0, sys.argv[1])
import training_world
from grpo.arguments import GrpoConfig
from grpo.build import build_trainer
trainer = build_trainer(GrpoConfig(**json.loads(sys.argv[2])))
stage, rank = sys.argv[3], int(sys.argv[4])
def hang(*_, **__):
    threading.Event().wait()
def hanging(when=2):
    return trainer.step_done + 1 == when and trainer.accelerator.process_index == rank
def scorer(trajectory, question, judge):
    if stage == "judge" and hanging():
        hang()
    return training_world.spread_reward(trajectory, question, judge)
trainer.engine.scorer = scorer
def wrap(owner, name, when=2):
    function = getattr(owner, name)
    def wrapped(*arguments, **named):
        return hang() if hanging(when) else function(*arguments, **named)
    setattr(owner, name, wrapped)
if stage == "decode":
    import visor.models.transformers
    wrap(visor.models.transformers, "decode")
if stage == "retrieve":
    wrap(trainer.engine.system.retriever, "search")
    reply = trainer.client.renderer.reply_text
    trainer.client.renderer.reply_text = lambda ids: "<think>page</think><search>apple</search>"
if stage == "update":
    wrap(trainer.update, "run")
if stage == "save":
    wrap(trainer.saver, "save", when=3)  # of step 2, which is done by then
trainer.train()
"""


def run_hanging(stage, world, out, tmp_path, processes=1, rank=0, timeout=6.0, **settings):
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    launch = [sys.executable]
    if processes > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    settings = grpo_settings(
        world, out, max_steps=3, save_steps=1, stage_timeout=timeout, save_total_limit=None, **settings
    )
    arguments = [str(script), str(Path(__file__).parent), json.dumps(settings), stage, str(rank)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    return subprocess.run([*launch, *arguments], capture_output=True, text=True, env=environment, timeout=280)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["decode", "judge", "retrieve", "update", "save"])
def test_what_hangs_is_named_and_the_run_goes_on_from_its_checkpoint(stage, world, tmp_path):
    out = tmp_path / "run"
    done = run_hanging(stage, world, out, tmp_path)
    assert done.returncode == STATUS, done.stderr[-3000:]
    assert f"watchdog: stage {stage} has shown no progress" in done.stderr
    assert "in hang" in done.stderr  # the stack
    assert f"goes on from {out / 'checkpoint-1'}" in done.stderr
    if stage == "judge":
        assert ", sample " in done.stderr
    finished = 2 if stage == "save" else 1
    assert [line["step"] for line in read_metrics(out)] == list(range(1, finished + 1))
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-1"]
    trainer = trainer_for(world, out, max_steps=3, save_steps=1, save_total_limit=None)
    assert trainer.step_done == 1
    trainer.train()
    assert [line["step"] for line in read_metrics(out)] == [1, 2, 3]


@pytest.mark.slow
def test_the_process_that_hangs_is_named(world, tmp_path):
    done = run_hanging("judge", world, tmp_path / "run", tmp_path, processes=2, rank=1, timeout=8.0)
    assert done.returncode != 0
    assert "watchdog: process 1 of 2: stage judge has shown no progress" in done.stderr


def test_a_run_in_which_nothing_hangs_is_never_ended(world, tmp_path):
    """Every stage takes a good part of the time allowed, and all of them together much more."""
    trainer = trainer_for(world, tmp_path, max_steps=3, save_steps=1, stage_timeout=3.0, **validating(world))
    slow(trainer.client, "_decode"), slow(trainer.update, "run"), slow(trainer.saver, "save")
    started = time.monotonic()
    trainer.train()
    assert time.monotonic() - started > 3.0
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]


def slow(owner, name, seconds=0.3):
    function = getattr(owner, name)

    def slowed(*arguments, **named):
        time.sleep(seconds)
        return function(*arguments, **named)

    setattr(owner, name, slowed)


def test_heartbeats_tell_whether_the_others_move(tmp_path):
    mine, other = Heartbeats(tmp_path, 0, 2), Heartbeats(tmp_path, 1, 2)
    assert not mine.others_hang(5)  # the other is not seen, so it counts as going on
    other.beat(1.0)
    assert not mine.others_hang(5)
    other.beat(60.0)
    assert mine.others_hang(5)
    assert not mine.others_hang(100)
    assert Heartbeats(tmp_path, 0, 1).others_hang(5)


def test_the_judge_has_the_time_of_its_retries(world, tmp_path):
    def limit(**settings):
        dog = run_watchdog(GrpoConfig(**grpo_settings(world, tmp_path, **settings)), 0, 1)
        return dog.limits["judge"]

    assert limit() == 0.0
    options = {"timeout": 100, "max_retries": 2}
    assert limit(judge="openai:m@http://127.0.0.1:9/v1", judge_options=options) > 300


def test_without_a_timeout_nothing_watches(world, tmp_path):
    config = GrpoConfig(**grpo_settings(world, tmp_path, stage_timeout=None))
    with run_watchdog(config, 0, 1) as dog:
        assert dog is None
