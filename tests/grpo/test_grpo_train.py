"""The whole loop on a tiny random policy: resume, reference, credit modes, refusals."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_world import read_metrics, spread_reward, trainer_for

from visor.types import Question, RewardBreakdown, Trajectory


class Killed(BaseException):
    pass


MODES = {
    "one update": {"credit": "trajectory", "beta": 0.05},
    "several updates": {
        "credit": "trajectory", "gradient_accumulation_steps": 1, "num_iterations": 2,
        "per_device_train_batch_size": 2, "lr_scheduler_type": "linear",
    },
    "turn": {"credit": "turn", "beta": 0.05, "gradient_accumulation_steps": 2},
    "frozen vision": {
        "credit": "turn", "beta": 0.05, "freeze": ["vision_tower", "projector"],
        "max_tokens_per_micro_batch": 200,
    },
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_resumed_run_equals_an_unbroken_one(mode, world, tmp_path):
    settings = {"max_steps": 4, "save_steps": 2, **MODES[mode]}
    trainer_for(world, tmp_path / "whole", **settings).train()

    broken = trainer_for(world, tmp_path / "broken", **settings)
    log = broken.journal.log

    def killed_after_step_3(metrics):
        log(metrics)
        if metrics["step"] == 3:
            raise Killed

    broken.journal.log = killed_after_step_3
    with pytest.raises(Killed):
        broken.train()
    assert [m["step"] for m in read_metrics(tmp_path / "broken")] == [1, 2, 3]
    resumed = trainer_for(world, tmp_path / "broken", **settings)
    assert resumed.step_done == 2
    resumed.train()
    same_run(tmp_path / "whole", tmp_path / "broken")


def same_run(whole: Path, resumed: Path) -> None:
    assert read_metrics(resumed) == read_metrics(whole)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (resumed, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    start = (
        load_file(whole.parent / "start.safetensors")
        if (whole.parent / "start.safetensors").exists()
        else None
    )
    assert start is None or any(not torch.equal(start[name], theirs[name]) for name in theirs)


DRIVER = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from training_world import grpo_settings, spread_reward
from grpo.arguments import GrpoConfig
from grpo.build import build_trainer
world, out = Path(sys.argv[2]), Path(sys.argv[3])
trainer = build_trainer(GrpoConfig(**grpo_settings(world, out, max_steps=4, save_steps=2)))
trainer.engine.scorer = spread_reward
write = trainer.saver.write_checkpoint
def die_in_second_checkpoint(folder, step, *rest):
    write(folder, step, *rest)
    if step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
trainer.saver.write_checkpoint = die_in_second_checkpoint
trainer.train()
"""


def test_kill_9_inside_a_checkpoint(world, tmp_path):
    arguments = [
        sys.executable,
        "-c",
        DRIVER,
        str(Path(__file__).parent),
        str(world),
        str(tmp_path / "broken"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    died = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert sorted(p.name for p in (tmp_path / "broken").glob("*checkpoint*")) == [
        ".tmp-checkpoint-4",
        "checkpoint-2",
    ]
    settings = {"max_steps": 4, "save_steps": 2}
    trainer_for(world, tmp_path / "broken", **settings).train()
    trainer_for(world, tmp_path / "whole", **settings).train()
    same_run(tmp_path / "whole", tmp_path / "broken")


def test_going_back_to_an_earlier_checkpoint_forgets_the_later_ones(world, tmp_path):
    settings = {"save_steps": 1, "save_total_limit": 3}
    trainer_for(world, tmp_path, max_steps=4, **settings).train()
    assert steps_kept(tmp_path) == [2, 3, 4]
    back = {"resume_from_checkpoint": str(tmp_path / "checkpoint-2"), "learning_rate": 1e-5}
    trainer_for(world, tmp_path, max_steps=3, **settings, **back).train()
    assert steps_kept(tmp_path) == [2, 3]
    trainer_for(world, tmp_path, max_steps=5, **settings, learning_rate=1e-5).train()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    assert steps_kept(tmp_path) == [3, 4, 5]


def steps_kept(folder):
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*"))


def test_checkpoints_load_without_pickle_and_as_models(world, tmp_path):
    from visor.models.loading import load_model, load_processor

    trainer_for(world, tmp_path, max_steps=2, save_steps=1, save_total_limit=1).train()
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pt"):
        torch.load(tmp_path / "checkpoint-2" / name, weights_only=True)
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        load_processor(folder).renderer()
        assert load_model(folder).lm_head.out_features > 100


def test_kl_to_the_starting_policy_is_zero_at_step_one_and_the_reference_stays(world, tmp_path):
    """Of whole weights; test_adapters.py has the same of adapters."""
    trainer = trainer_for(world, tmp_path, beta=0.1, max_steps=2)
    before = {name: p.clone() for name, p in trainer.update.reference.named_parameters()}
    trainer.train()
    first, second = read_metrics(tmp_path)
    assert first["kl"] < 1e-6 < second["kl"]
    assert all(torch.equal(p, before[name]) for name, p in trainer.update.reference.named_parameters())


def test_gap_is_nil_in_turn_mode_and_measured_in_trajectory_mode(world, tmp_path):
    gaps = {}
    for credit in ("turn", "trajectory"):
        trainer_for(world, tmp_path / credit, credit=credit, max_steps=1).train()
        (metrics,) = read_metrics(tmp_path / credit)
        gaps[credit] = metrics["logprob_gap_max"]
    assert gaps["turn"] < 1e-5
    # The window (W = 1) hid the first turn from the third reply; the trajectory row shows it.
    assert gaps["trajectory"] > 1e-3


def test_turn_rows_that_are_not_what_was_sampled_stop_the_run(world, tmp_path):
    trainer = trainer_for(world, tmp_path, credit="turn", max_steps=1, max_logprob_gap=1e-3)
    build = trainer.build_rows

    def shifted(trajectory):
        rows = build(trajectory)
        for row in rows:
            row.old_logprobs = [value and value - 0.5 for value in row.old_logprobs]
        return rows

    trainer.build_rows = shifted
    with pytest.raises(ValueError, match=r"q\d/\d, turn \d: log-probabilities differ"):
        trainer.train()


def test_rows_over_the_limit_are_counted_in_the_metrics(world, tmp_path):
    trainer_for(world, tmp_path / "whole", credit="turn", max_steps=1).train()
    trainer_for(world, tmp_path / "short", credit="turn", max_steps=1, max_length=40).train()
    (whole,), (short,) = (read_metrics(tmp_path / name) for name in ("whole", "short"))
    assert whole["rows_over_length"] == 0 < short["rows_over_length"]
    assert short["rows"] + short["rows_over_length"] == whole["rows"]


def test_unscored_trajectories_leave_the_loss(world, tmp_path):
    def scorer(trajectory: Trajectory, question: Question, judge) -> RewardBreakdown:
        if trajectory.sample_index == 1:
            return RewardBreakdown(total=None, unscored_reason="judge fault")
        return spread_reward(trajectory, question, judge)

    trainer = trainer_for(world, tmp_path, scorer=scorer, max_steps=1)
    trainer.train()
    (metrics,) = read_metrics(tmp_path)
    assert (metrics["unscored"], metrics["rows"]) == (2, 4)
    records = [json.loads(line) for line in (tmp_path / "rollouts" / "step-1.jsonl").read_text().splitlines()]
    assert [r["meta"]["advantage"] is None for r in records] == [False, True, False] * 2


def test_groups_without_spread_train_nothing(world, tmp_path):
    def same(trajectory, question, judge):
        return RewardBreakdown(total=0.85)

    trainer = trainer_for(world, tmp_path, scorer=same, max_steps=1)
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    (metrics,) = read_metrics(tmp_path)
    assert (metrics["groups_dropped"], metrics["trained_tokens"], metrics["grad_norm"]) == (2, 0, 0.0)
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())


def test_reward_goes_up(world, tmp_path):
    """Not only the plumbing: a policy rewarded for early ids learns to sample them."""

    def low_ids(trajectory, question, judge):
        ids = [i for turn in trajectory.turns for i in turn.completion.token_ids]
        return RewardBreakdown(total=sum(i < 170 for i in ids) / len(ids))

    trainer = trainer_for(
        world, tmp_path, scorer=low_ids, max_steps=14, learning_rate=1e-2, questions_per_step=4,
        num_generations=4, per_device_train_batch_size=16, freeze=["vision_tower", "projector"],
    )  # fmt: skip
    trainer.train()
    rewards = [m["reward"] for m in read_metrics(tmp_path)]
    assert rewards[0] < 0.7
    assert min(rewards[-3:]) > 0.8


def test_auxiliary_loss_is_added_and_falls(world, tmp_path):
    lines = [
        {"messages": [{"role": "user", "content": "page"}, {"role": "assistant", "content": " apple 3"}]},
        {"messages": [{"role": "user", "content": "search"}, {"role": "assistant", "content": " brick 4"}]},
    ]
    path = tmp_path / "reading.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    auxiliary = {"path": str(path), "weight": 1.0, "rows_per_step": 2}
    trainer_for(world, tmp_path / "run", auxiliary=auxiliary, max_steps=6, learning_rate=5e-3).train()
    losses = [m["auxiliary_loss"] for m in read_metrics(tmp_path / "run")]
    assert losses[-1] < 0.7 * losses[0]
