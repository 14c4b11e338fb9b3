"""What a run writes while it trains: every figure of the metrics line, highlights, trackers."""

import importlib.util
import json
import time

import pytest
from training_world import grpo_settings, read_metrics, trainer_for

from grpo.arguments import GrpoConfig
from grpo.trackers import RUN_IDS, flat, numbers
from visor.config import load_config
from visor.types import Completion

FIGURES = {
    "reward", "reward_parts", "reward_std", "accuracy", "completeness", "delta_counts", "verification_share",
    "invalid_action_rate", "finish_rate", "crop_rate", "mean_searches", "visual_tokens_per_call",
    "prompt_tokens_per_call", "sampled_tokens", "stop_reasons", "groups", "groups_dropped",
    "group_reward_std", "kl", "entropy", "clip_ratio", "logprob_gap_mean", "logprob_gap_max", "loss",
    "grad_norm", "learning_rate", "seconds", "alarms",
}  # fmt: skip


def test_every_step_has_every_figure_and_the_stages_of_its_time(world, tmp_path):
    trainer_for(world, tmp_path, max_steps=2, beta=0.1).train()
    for line in map(json.loads, (tmp_path / "metrics.jsonl").open()):
        assert line.keys() >= FIGURES
        seconds = line["seconds"]
        assert seconds["stages"].keys() == {
            "encode", "retrieve", "crop", "decode", "judge", "update", "push",
        }  # fmt: skip
        assert all(seconds["stages"][stage] > 0 for stage in ("encode", "decode", "judge", "update"))
        assert seconds["stages"]["update"] <= seconds["update"]
        assert seconds["stages"]["decode"] < seconds["rollout"]
        assert sum(seconds["shares"].values()) > 0.3
        assert line["sampled_tokens"] > 0


def test_highlights_every_so_many_steps(world, tmp_path):
    trainer_for(world, tmp_path, max_steps=5, save_steps=5, log_trajectories_steps=2).train()
    names = sorted(path.name for path in (tmp_path / "highlights").iterdir())
    assert names == ["step-2.txt", "step-4.txt"]
    records = [json.loads(line) for line in (tmp_path / "rollouts" / "step-4.jsonl").open()]
    best = max(records, key=lambda record: record["reward"]["total"])
    head = (tmp_path / "highlights" / "step-4.txt").read_text().splitlines()[1]
    assert head.startswith(f"question {best['question_id']}, sample {best['sample_index']}: ")
    trainer_for(world, tmp_path / "none", max_steps=2).train()
    assert not (tmp_path / "none" / "highlights").exists()


class Teacher:
    """A judge's model in this process."""

    name = "teacher"

    async def complete(self, request):
        return Completion(text="<judge>True</judge>")


def test_what_the_judge_was_asked_is_counted_by_step(world, tmp_path):
    from rewards.judge import ModelJudge
    from rewards.judge_cache import JudgeCache

    trainer = trainer_for(world, tmp_path, max_steps=2)
    trainer.engine.judge = judge = ModelJudge(Teacher(), cache=JudgeCache(tmp_path / "judge.jsonl"))

    async def asking(trajectory, question, judge):
        from visor.types import RewardBreakdown

        verdict = await judge.averdict(question.text, question.gold_answers, "the same")
        return RewardBreakdown(total=float(trajectory.sample_index), verdict=verdict.value)

    trainer.engine.scorer = asking
    trainer.train()
    lines = read_metrics(tmp_path)
    asked = [(line["judge_calls"], line["judge_cached"], line["judge_failures"]) for line in lines]
    assert [sum(counts) for counts in asked] == [6, 6]
    assert sum(calls for calls, _, _ in asked) == 4  # one for each question of the world
    assert judge.counts.calls == 0


def test_names_of_trackers(world, tmp_path):
    def parsed(value):
        return GrpoConfig(**grpo_settings(world, tmp_path, report_to=value)).report_to

    assert parsed("none") == parsed(None) == parsed([]) == []
    assert parsed("wandb") == ["wandb"]
    assert parsed(["wandb", "tensorboard"]) == ["wandb", "tensorboard"]
    with pytest.raises(ValueError, match="report_to"):
        parsed("comet")
    words = "--model_name_or_path m --output_dir o --corpus c --questions q --report_to".split()
    both = ["wandb", "tensorboard"]
    for written, read in (("wandb", ["wandb"]), ("[wandb, tensorboard]", both), ("none", [])):
        assert load_config(GrpoConfig, None, [*words, written]).report_to == read


def test_nested_figures_are_flat_numbers_for_a_tracker():
    figures = {"a": 1, "b": {"c": 2.5, "d": {"e": 3}}, "f": None, "g": ["x"], "h": True, "i": "text"}
    assert numbers(figures) == {"a": 1, "b/c": 2.5, "b/d/e": 3}
    assert flat(figures)["g"] == ["x"]


def needs(name):
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


@needs("tensorboard")
def test_tensorboard_gets_every_number_and_a_resumed_run_no_step_twice(world, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = {"report_to": ["tensorboard"], "log_trajectories_steps": 1, "save_steps": 2}
    trainer_for(world, tmp_path, max_steps=3, **settings).train()
    (tmp_path / "checkpoint-3").rename(tmp_path / "lost")
    trainer_for(world, tmp_path, max_steps=4, **settings).train()
    events = EventAccumulator(str(tmp_path / "tensorboard" / "grpo"))
    events.Reload()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    for name in ("reward", "entropy", "seconds/shares/decode", "reward_parts/format_penalty"):
        shown = {event.step: event.value for event in events.Scalars(name)}
        assert sorted(shown) == [event.step for event in events.Scalars(name)] == [1, 2, 3, 4]
        for line in lines:
            assert shown[line["step"]] == pytest.approx(flat(line)[name], rel=1e-5)
    # TensorBoard purges numbers only: the text of the step that was done again is there twice, the same.
    texts = [(event.step, event.tensor_proto) for event in events.Tensors("trajectories/best/text_summary")]
    assert [step for step, _ in texts] == [1, 2, 3, 3, 4]
    assert texts[2] == texts[3]


@needs("wandb")
def test_wandb_works_offline_and_a_resumed_run_keeps_its_id(world, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = {"report_to": "wandb", "log_trajectories_steps": 1, "save_steps": 1}
    trainer_for(world, tmp_path, max_steps=1, **settings).train()
    run_id = json.loads((tmp_path / RUN_IDS).read_text())["wandb"]
    trainer_for(world, tmp_path, max_steps=2, **settings).train()
    assert json.loads((tmp_path / RUN_IDS).read_text())["wandb"] == run_id
    files = list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}/*.wandb"))
    assert len(files) == 2
    deadline = time.monotonic() + 60  # W&B's own process writes them
    while not all(path.stat().st_size > 1000 for path in files) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(path.stat().st_size > 1000 for path in files)
