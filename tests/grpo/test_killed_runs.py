"""kill -9 at any moment of a run: gone on with, it equals an unbroken one to the bit."""

import random

import pytest
from killed_runs import Runner, check_same, contents
from training_world import validating


def settings(world, **more):
    """Everything that a run writes and draws: groups drawn again, validation, the best model, old checkpoints
    that go, highlights."""
    return {
        "beta": 0.05, "lr_scheduler_type": "linear", "filter_zero_std_groups": True,
        "max_resampling_rounds": 1, "save_total_limit": 1, "log_trajectories_steps": 1,
        "load_best_model_at_end": True, **validating(world, eval_on_start=True), **more,
    }  # fmt: skip


def check_kills_before(operations, runner, folder):
    """Run unbroken and, for each number in `operations` of its count, killed before that disk operation."""
    count = runner.run(folder / "whole")["operations"]
    whole = contents(folder / "whole")
    for number in operations(count):
        out = folder / f"killed-{number}"
        assert runner.run(out, kill_before=number)["killed"], number
        runner.run(out)
        check_same(whole, contents(out))
    return count


def test_killed_before_some_disk_operations(world, tmp_path):
    def some(count):
        return random.Random(count).sample(range(count // 4, count + 1), 2)

    with Runner(world, settings(world, max_steps=2, save_steps=1)) as runner:
        assert check_kills_before(some, runner, tmp_path) > 80


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_before_every_disk_operation(world, tmp_path):
    with Runner(world, settings(world, max_steps=3, save_steps=2)) as runner:
        check_kills_before(lambda count: range(1, count + 1), runner, tmp_path)


MODES = {
    "trajectory": {"credit": "trajectory", "gradient_accumulation_steps": 1, "num_iterations": 2},
    "turn": {"credit": "turn", "gradient_accumulation_steps": 2},
    "lora with dropout": {"use_peft": True, "lora_dropout": 0.2},
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES)
def test_killed_at_random_moments_again_and_again(mode, world, tmp_path):
    """Ten runs, each killed by another process whenever chance will, until it gets to the end."""
    with Runner(world, settings(world, max_steps=5, save_steps=2, **MODES[mode])) as runner:
        seconds = runner.run(tmp_path / "whole")["seconds"]
        whole = contents(tmp_path / "whole")
        kills = 0
        for seed in range(10):
            chance, out = random.Random(seed), tmp_path / f"killed-{seed}"
            patience = seconds
            while runner.run(out, kill_after=chance.uniform(0.1, 1.0) * patience)["killed"]:
                kills += 1
                patience *= 1.1  # a run that is always killed before its first checkpoint would never end
            check_same(whole, contents(out))
        assert kills >= 10
