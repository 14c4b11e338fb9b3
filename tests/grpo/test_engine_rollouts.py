"""GRPO on a sampling engine: what is pushed when, the gap to the trainer, and that nothing else changes.

The engine is a second copy of the model in this process (`TwinEngine`). It samples as the Transformers client
does, so that a whole run can be compared; vLLM itself is in `test_vllm_grpo.py`.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from training_world import grpo_settings, read_metrics, read_timeless, trainer_for, validating
from twin_engine import TwinEngine

from grpo.arguments import GrpoConfig
from grpo.engine_build import engine_arguments
from grpo.engine_policy import EngineLost
from grpo.trackers import numbers
from visor.models.loading import load_model, load_processor
from visor.models.lora import add_lora, save_policy
from visor.models.sampling_engine import EngineFailed

ENGINES = []


@pytest.fixture(autouse=True)
def _twin(monkeypatch):
    ENGINES.clear()

    def make(path, **settings):
        ENGINES.append(TwinEngine(path, **settings))
        return ENGINES[-1]

    monkeypatch.setattr("visor.models.vllm_engine.LocalEngine", make)


def write_trained_adapter(base, out):
    """An adapter as after SFT: its B matrices are no longer zero."""
    model = add_lora(load_model(base), rank=2, alpha=4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    save_policy(model, out)
    load_processor(base).save_pretrained(out)


def without_gap(line):
    return {k: v for k, v in line.items() if not k.startswith("train_inference_gap")}


@pytest.mark.parametrize("credit", ["turn", "trajectory"])
def test_a_run_on_an_engine_is_the_run_on_the_policy(credit, world, tmp_path):
    settings = {"credit": credit, "max_steps": 3, "learning_rate": 1e-3, **validating(world)}
    trainer_for(world, tmp_path / "policy", **settings).train()
    trainer_for(world, tmp_path / "engine", use_vllm=True, **settings).train()
    (engine,) = ENGINES
    assert engine.pushes == engine.resets == 4  # at the start and after each step
    assert engine.closed == 1
    for ours, theirs in zip(
        read_metrics(tmp_path / "engine"), read_metrics(tmp_path / "policy"), strict=True
    ):
        assert ours["train_inference_gap_max"] < 1e-4
        assert without_gap(numbers(ours)) == pytest.approx(numbers(theirs), rel=1e-3, abs=1e-5)
    ours, theirs = (read_timeless(tmp_path / run / "validation.jsonl") for run in ("engine", "policy"))
    assert [numbers(line) for line in ours] == [pytest.approx(numbers(line), abs=1e-5) for line in theirs]
    ours, theirs = (load_file(tmp_path / run / "model.safetensors") for run in ("engine", "policy"))
    assert all(torch.allclose(ours[name], theirs[name], atol=2e-4) for name in theirs)


def test_every_reply_names_the_version_it_was_sampled_by(world, tmp_path):
    trainer_for(world, tmp_path, use_vllm=True, max_steps=3, save_steps=1, **validating(world)).train()
    assert [versions(tmp_path / "rollouts" / f"step-{n}.jsonl") for n in (1, 2, 3)] == [{0}, {1}, {2}]
    assert [versions(tmp_path / "validation" / f"step-{n}.jsonl") for n in (1, 2, 3)] == [{1}, {2}, {3}]


def versions(path):
    records = [json.loads(line) for line in path.open()]
    return {turn["completion"]["policy_version"] for record in records for turn in record["turns"]}


def test_a_resumed_run_begins_with_a_push_and_keeps_the_fixed_reply(world, tmp_path):
    settings = {"use_vllm": True, "save_steps": 1, "credit": "turn"}
    for run, steps in (("whole", [3]), ("broken", [2, 3])):
        for max_steps in steps:
            trainer_for(world, tmp_path / run, max_steps=max_steps, **settings).train()
    assert read_metrics(tmp_path / "broken") == read_metrics(tmp_path / "whole")
    ours, theirs = (load_file(tmp_path / run / "model.safetensors") for run in ("broken", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_an_adapter_is_sampled_from_as_it_is_trained(world, tmp_path):
    write_trained_adapter(world / "policy", tmp_path / "adapter")
    trainer = trainer_for(
        world, tmp_path / "run", use_vllm=True, credit="turn", max_steps=2,
        model_name_or_path=str(tmp_path / "adapter"),
    )  # fmt: skip
    trainer.train()
    assert ENGINES[0].model == str(world / "policy")
    for line in read_metrics(tmp_path / "run"):
        assert line["train_inference_gap_max"] < 1e-4
        assert line["logprob_gap_max"] < 1e-4


# ---------------------------------------------------------------- a push that is not whole


def test_a_push_that_skips_a_weight_does_not_start(world, tmp_path, monkeypatch):
    def skipping(engine, weights):
        engine.twin.load_state_dict(
            {n: w for n, w in weights if "layers.1.mlp.down_proj" not in n}, strict=False
        )

    monkeypatch.setattr(TwinEngine, "load_weights", skipping)
    with pytest.raises(ValueError, match=r"differ by .* on average, .* over max_train_inference_gap = 0.001"):
        trainer_for(world, tmp_path, use_vllm=True)


def test_a_push_that_stops_working_shows_in_the_next_steps(world, tmp_path):
    trainer = trainer_for(world, tmp_path, use_vllm=True, max_steps=2)
    ENGINES[0].load_weights = lambda weights: list(weights)
    trainer.train()
    first, second = read_metrics(tmp_path)
    assert 1e-3 < first["train_inference_gap_mean"] < second["train_inference_gap_mean"]
    assert first["train_inference_gap_mean"] <= first["train_inference_gap_max"]


@pytest.mark.parametrize("reset", [True, False])
def test_features_of_other_weights_show_in_the_gap(reset, world, tmp_path):
    trainer = trainer_for(world, tmp_path, use_vllm=True)
    if not reset:
        ENGINES[0].reset_caches = lambda: None
    with torch.no_grad():
        for parameter in trainer.model.model.visual.parameters():
            parameter.mul_(1.5)
    gap = trainer.engine_policy.refresh(1)["train_inference_gap_mean"]
    assert gap < 1e-5 if reset else gap > 1e-3


def test_the_tolerance_is_an_option(world, tmp_path, monkeypatch):
    score = TwinEngine.score
    monkeypatch.setattr(TwinEngine, "score", lambda *asked: [value - 5e-4 for value in score(*asked)])
    trainer_for(world, tmp_path, use_vllm=True)
    with pytest.raises(ValueError, match=r"differ by 0.0005 .* over max_train_inference_gap = 0.0001"):
        trainer_for(world, tmp_path, use_vllm=True, max_train_inference_gap=1e-4)


# ---------------------------------------------------------------- limits, refusals, a lost engine


def test_the_engine_gets_the_limits_that_the_plan_prints(world, tmp_path, capsys):
    from grpo.train import main

    trainer_for(world, tmp_path / "run", use_vllm=True, **validating(world))
    (engine,) = ENGINES
    capsys.readouterr()
    settings = grpo_settings(world, tmp_path / "plan", use_vllm=True, **validating(world))
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(settings))
    with pytest.raises(SystemExit):
        main(["--config", str(path), "--plan"])
    shown = capsys.readouterr().out
    assert f"max_model_len {engine.max_context:,} (" in shown
    assert f"images per prompt {engine.max_images}" in shown


def test_a_length_under_the_longest_context_is_refused(world, tmp_path):
    with pytest.raises(ValueError, match=r"over vllm_max_model_length 60; set that to at least 1\d\d"):
        trainer_for(world, tmp_path, use_vllm=True, vllm_max_model_length=60)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vllm_mode": "server"}, "needs vllm_server_base_url"),
        ({"vllm_server_base_url": "http://127.0.0.1:1"}, "is for vllm_mode server"),
        (
            {"vllm_mode": "server", "vllm_server_base_url": "http://h:1", "vllm_tensor_parallel_size": 2},
            "its own option",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message, world, tmp_path):
    with pytest.raises(ValueError, match=message):
        GrpoConfig(**grpo_settings(world, tmp_path, use_vllm=True, **settings))
    GrpoConfig(**grpo_settings(world, tmp_path, **settings))  # nothing is used


def test_sleep_mode_needs_a_gpu_and_one_engine_belongs_to_one_process(world, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = GrpoConfig(**grpo_settings(world, tmp_path, use_vllm=True, vllm_enable_sleep_mode=True))
    with pytest.raises(ValueError, match="there is no GPU here"):
        engine_arguments(config, 1, torch.float32)
    config = GrpoConfig(**grpo_settings(world, tmp_path, use_vllm=True, vllm_tensor_parallel_size=2))
    assert engine_arguments(config, 1, torch.bfloat16)["tensor_parallel_size"] == 2
    with pytest.raises(ValueError, match="vllm_mode server has an engine"):
        engine_arguments(config, 2, torch.float32)


def test_a_lost_engine_ends_the_run_instead_of_filling_it_with_faults(world, tmp_path):
    trainer = trainer_for(world, tmp_path, use_vllm=True)

    async def dead(prompt, params):
        raise EngineFailed("the engine died")

    ENGINES[0].generate = dead
    with pytest.raises(EngineLost, match="the engine died"):
        trainer.train()
    assert not (tmp_path / "metrics.jsonl").exists()
    assert ENGINES[0].closed == 1
