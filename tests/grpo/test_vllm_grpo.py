"""GRPO on the real vLLM engine: in this process, and in a server of its own."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training_world import grpo_settings, read_metrics, trainer_for, validating

from visor.models.base import Request, Sampling
from visor.models.loading import load_model, load_processor
from visor.models.tensors import collate, forward_logprobs

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
ENGINE = {"use_vllm": True, "credit": "turn", "max_completion_length": 16, "learning_rate": 1e-3}
"""A rate that moves every weight far beyond rounding."""
TOLERANCE = 1e-3
"""Nats; float32 on both sides, with other kernels."""


@pytest.fixture
def settings(slide_policy):
    return {"model_name_or_path": str(slide_policy), **ENGINE}


def held_to_the_trainer(metrics):
    for line in metrics:
        assert line["logprob_gap_max"] < TOLERANCE
        assert line["train_inference_gap_mean"] <= line["train_inference_gap_max"] < TOLERANCE
        assert line["stop_reasons"].get("error", 0) == 0
        assert line["rows"] > 0 < line["grad_norm"]


def test_a_colocated_run_samples_from_the_policy_in_training(world, tmp_path, settings):
    trainer = trainer_for(world, tmp_path, **settings, max_steps=2, save_steps=2, **validating(world))
    policy = trainer.engine_policy
    before = policy.probe.of_engine()
    close, final = policy.engine.close, {}

    def last_look():
        final["engine"], final["trainer"] = (
            policy.probe.of_engine(), policy.probe.of_trainer(trainer.accelerator.autocast),
        )  # fmt: skip
        # A push that is not whole is seen: the engine refuses it and samples no more.
        weights = list(trainer.accelerator.unwrap_model(trainer.model).state_dict().items())
        with pytest.raises(ValueError, match="weights missing"):
            policy.engine.load_weights([pair for pair in weights if "layers.1.mlp" not in pair[0]])
        close()

    policy.engine.close = last_look
    trainer.train()
    held_to_the_trainer(read_metrics(tmp_path))
    assert max(abs(a - b) for a, b in zip(final["engine"], final["trainer"])) < TOLERANCE
    assert max(abs(a - b) for a, b in zip(final["engine"], before)) > 10 * TOLERANCE
    loads_everywhere(tmp_path / "checkpoint-2", policy.probe, final["trainer"])


def loads_everywhere(checkpoint, probe, expected):
    """The checkpoint is the policy, for plain Transformers and for vLLM."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint).eval()
    renderer = load_processor(checkpoint).renderer()
    with torch.no_grad():
        logprobs = forward_logprobs(model, collate([probe.row], renderer, probe.client.images))[0]
    start = len(probe.prompt.input_ids)
    ours = logprobs[start : start + len(probe.reply_ids)].tolist()
    assert ours == pytest.approx(expected, abs=1e-4)
    # In a process of its own, as the run has closed the process group that engines of this one share.
    prompt = probe.client.prompt(probe.prompt)
    images = [(image.size, image.tobytes().hex()) for image in prompt.images]
    asked = json.dumps([str(checkpoint), list(prompt.token_ids), images, probe.reply_ids])
    scored = subprocess.run(
        [sys.executable, "-c", SCORER], input=asked, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert scored.returncode == 0, scored.stderr[-3000:]
    theirs = json.loads(scored.stdout.splitlines()[-1])
    assert theirs == pytest.approx(expected, abs=TOLERANCE)


SCORER = """
import json, sys
from PIL import Image
from visor.models.sampling_engine import EnginePrompt
from visor.models.vllm_engine import LocalEngine
if __name__ == "__main__":
    path, ids, images, reply = json.load(sys.stdin)
    pictures = [Image.frombytes("RGB", tuple(size), bytes.fromhex(data)) for size, data in images]
    arguments = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 256 << 20}
    engine = LocalEngine(path, max_context=512, max_images=2, engine_args=arguments)
    scores = engine.score(EnginePrompt(ids, pictures), reply)
    engine.close()
    print(json.dumps(scores))
"""
DRIVER = """
import json, os, signal, sys
sys.path.insert(0, sys.argv[1])
from grpo.arguments import GrpoConfig
from grpo.build import build_trainer
from training_world import spread_reward
if __name__ == "__main__":
    trainer = build_trainer(GrpoConfig(**json.loads(sys.argv[2])))
    trainer.engine.scorer = spread_reward
    log = trainer.journal.log
    def die_after_step_2(metrics):
        log(metrics)
        if metrics["step"] == 2 and trainer.saved_step == 1 and sys.argv[3] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
    trainer.journal.log = die_after_step_2
    trainer.train()
"""


def test_a_killed_run_goes_on(world, tmp_path, settings):
    """Not to the last bit: which requests the engine computes together depends on when they come, and so does
    the rounding of their logits. Weights, optimizer and data order are those of the checkpoint."""
    settings = {**settings, "max_steps": 3, "save_steps": 1}
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    run = tmp_path / "run"
    arguments = [str(driver), str(Path(__file__).parent), json.dumps(grpo_settings(world, run, **settings))]

    def start(how):
        return subprocess.run(
            [sys.executable, *arguments, how], env=ENVIRONMENT, capture_output=True, text=True
        )

    died = start("die")
    assert died.returncode == -signal.SIGKILL, died.stderr[-3000:]
    assert [line["step"] for line in read_metrics(run)] == [1, 2]
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-1"]
    reply = (run / "fixed_reply.json").read_text()
    resumed = start("live")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    metrics = read_metrics(run)
    assert [line["step"] for line in metrics] == [1, 2, 3]
    held_to_the_trainer(metrics)
    assert (run / "fixed_reply.json").read_text() == reply


@pytest.fixture
def server(slide_policy):
    sys.path.insert(0, str(ROOT / "tests"))
    from engine_process import EngineProcess

    started = EngineProcess(
        "-m", "visor.cli", "vllm-serve", str(slide_policy), "--port", "0", "--max-context", "512",
        "--max-images", "3", "--dtype", "float32", "--engine-arg", "enforce_eager=true",
        "--engine-arg", "kv_cache_memory_bytes=268435456", seconds=900,
    )  # fmt: skip
    yield started
    started.kill()


def test_a_run_on_a_server(world, tmp_path, settings, server):
    settings = {**settings, "vllm_mode": "server", "vllm_server_base_url": server.url}
    trainer = trainer_for(world, tmp_path, **settings, max_steps=2)
    client = trainer.client
    trainer.train()
    held_to_the_trainer(read_metrics(tmp_path))
    # The server goes on, and what it holds is the trained policy.
    (metrics, probe) = read_metrics(tmp_path)[-1], trainer.engine_policy.probe
    assert metrics["step"] == 2
    model = load_model(tmp_path, dtype="float32")
    with torch.no_grad():
        batch = collate([probe.row], client.renderer, client.images)
        expected = forward_logprobs(model, batch)[0][len(probe.prompt.input_ids) :][: len(probe.reply_ids)]
    from visor.models.vllm import VLLMClient
    from visor.models.vllm_remote import RemoteEngine

    engine = RemoteEngine(server.url, settings["model_name_or_path"], own_weights=False)
    other = VLLMClient(engine, client.renderer, client.images)
    assert other.score(probe.prompt, probe.reply_ids) == pytest.approx(expected.tolist(), abs=TOLERANCE)
    request = Request(list(_messages(trainer)), seed=1, sampling=Sampling(max_tokens=4))
    assert asyncio.run(other.complete(request)).token_ids
    longer = {**settings, "max_completion_length": 500}
    with pytest.raises(ValueError, match=r"start it with --max-context \d+"):
        trainer_for(world, tmp_path / "long", **longer)


def _messages(trainer):
    from grpo.train_inference_gap import probe_messages

    return probe_messages(trainer.questions[0], trainer.config.episode, trainer.client, 4)
