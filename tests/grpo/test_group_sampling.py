"""Groups without a gradient: left out, counted by reason, made up for within bounds, and resumed exactly."""

import json
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from training_world import picky_reward, read_metrics, spread_reward, trainer_for
from update_stage import make_stage

from grpo.advantage import without_gradient
from grpo.arguments import GrpoConfig
from grpo.batch import rows_of_groups
from grpo.schedule import items_from, step_items
from rollout.group import Group
from rollout.rows import trajectory_row
from visor.types import RewardBreakdown

RESAMPLE = {"filter_zero_std_groups": True, "max_resampling_rounds": 3}
REASONS = ("groups_all_equal", "groups_unscored", "groups_too_few_scored")


def records(folder, step):
    return [json.loads(line) for line in (folder / "rollouts" / f"step-{step}.jsonl").open()]


def asked(folder, step, size=3) -> list[str]:
    """Question ids of a step's groups, in the order they were drawn."""
    return [record["question_id"] for record in records(folder, step)][::size]


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([1.0, 0.0], None),
        ([0.3, 0.1 + 0.2, None], "all_equal"),
        ([None, None], "unscored"),
        ([], "unscored"),
        ([None, 0.4], "too_few_scored"),
    ],
)
def test_why_a_group_has_no_gradient(rewards, reason):
    assert without_gradient(rewards) == reason


def test_the_walk_can_be_taken_in_pieces():
    whole = items_from(range(5), 0, 12, seed=3)
    pieces = items_from(range(5), 0, 4, 3) + items_from(range(5), 4, 1, 3) + items_from(range(5), 5, 7, 3)
    assert pieces == whole
    assert step_items(range(5), 3, 4, 3) == items_from(range(5), 8, 4, 3)


def test_missing_groups_are_drawn_from_the_same_order(world, tmp_path):
    trainer = trainer_for(world, tmp_path, scorer=picky_reward, max_steps=3, **RESAMPLE)
    trainer.train()
    metrics = read_metrics(tmp_path)
    walk = [question.question_id for question in items_from(trainer.questions, 0, 40, trainer.config.seed)]
    drawn = [name for step in (1, 2, 3) for name in asked(tmp_path, step)]
    assert drawn == walk[: len(drawn)]
    assert trainer.questions_drawn == len(drawn) > 6
    for step, line in enumerate(metrics, start=1):
        names = asked(tmp_path, step)
        assert line["groups"] == len(names)
        assert sum(line[name] for name in REASONS) == line["groups_dropped"]
        assert line["groups"] - line["groups_dropped"] == 2 - line["groups_missing"]
        assert 0 < line["resampling_rounds"] <= 3
        assert line["groups_all_equal"] == names.count("q1")
        assert line["groups_unscored"] == names.count("q3")
        assert line["rows"] == 3 * (line["groups"] - line["groups_dropped"])
        # The figures of the step are over everything sampled, not over what the filter kept.
        totals = [r["reward"]["total"] for r in records(tmp_path, step)]
        scored = [total for total in totals if total is not None]
        assert line["reward"] == pytest.approx(sum(scored) / len(scored))
        reasons = {r["question_id"]: r["meta"].get("no_gradient") for r in records(tmp_path, step)}
        assert {"q1": "all_equal", "q2": None, "q3": "unscored"}.items() >= {
            (name, reason) for name, reason in reasons.items() if name != "q4"
        }
    assert sum(line["groups_too_few_scored"] for line in metrics) > 0


def test_the_budget_of_rounds_is_bounded_and_said(world, tmp_path, capsys):
    def same(trajectory, question, judge):
        return RewardBreakdown(total=0.5)

    settings = {"filter_zero_std_groups": True, "max_resampling_rounds": 2, "alarms": {"patience": 2}}
    trainer_for(world, tmp_path, scorer=same, max_steps=2, **settings).train()
    for line in read_metrics(tmp_path):
        assert (line["groups"], line["groups_all_equal"], line["groups_missing"]) == (6, 6, 2)
        assert (line["resampling_rounds"], line["rows"], line["trained_tokens"]) == (2, 0, 0)
    assert "alarm no_reward_variance" in capsys.readouterr().out


def test_a_question_drawn_twice_in_a_step_numbers_its_samples_on(world, tmp_path):
    trainer_for(world, tmp_path, scorer=picky_reward, max_steps=1, **RESAMPLE, questions_per_step=4).train()
    counted = Counter((r["question_id"], r["sample_index"]) for r in records(tmp_path, 1))
    assert set(counted.values()) == {1}
    assert max(sample for _, sample in counted) > 2


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_resumed_run_with_resampling_equals_an_unbroken_one(scale, world, tmp_path):
    settings = {"scorer": picky_reward, "save_steps": 2, "scale_rewards": scale, **RESAMPLE}
    trainer_for(world, tmp_path / "whole", max_steps=4, **settings).train()
    trainer_for(world, tmp_path / "broken", max_steps=3, **settings).train()
    for path in (tmp_path / "broken").glob("checkpoint-3"):
        path.rename(tmp_path / "lost")  # as if the run had died in step 4 without having saved step 3
    resumed = trainer_for(world, tmp_path / "broken", max_steps=4, **settings)
    assert resumed.step_done == 2
    assert resumed.questions_drawn > 4
    resumed.train()
    assert read_metrics(tmp_path / "broken") == read_metrics(tmp_path / "whole")
    for step in range(1, 5):
        ours, theirs = (records(tmp_path / name, step) for name in ("broken", "whole"))
        assert [[t["completion"]["token_ids"] for t in r["turns"]] for r in ours] == [
            [t["completion"]["token_ids"] for t in r["turns"]] for r in theirs
        ]
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("broken", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_checkpoint_without_a_count_goes_on_where_its_steps_ended(world, tmp_path):
    trainer_for(world, tmp_path, max_steps=2).train()
    path = tmp_path / "checkpoint-2" / "trainer_state.json"
    assert json.loads(path.read_text())["questions_drawn"] == 4
    path.write_text(json.dumps({"schema_version": 1, "step": 2}))
    assert trainer_for(world, tmp_path, max_steps=3).questions_drawn == 4


def test_a_filtered_group_leaves_token_mean_and_batch_scale(world):
    renderer, images, group, _ = make_stage(world)
    equal = Group(group.question, [t.model_copy(deep=True) for t in group.trajectories])
    for trajectory in equal.trajectories:
        trajectory.reward = RewardBreakdown(total=9.0)

    def build(trajectory):
        return [trajectory_row(trajectory, renderer, images)]

    groups = [group, equal]
    alone = rows_of_groups([group], build, scale_rewards="batch")
    kept = rows_of_groups(groups, build, scale_rewards="batch")
    assert (len(kept.rows), kept.groups_dropped) == (6, 1)
    assert kept.rows[0].row.advantage != pytest.approx(alone.rows[0].row.advantage)
    filtered = rows_of_groups(groups, build, scale_rewards="batch", filter_zero_std_groups=True)
    assert (len(filtered.rows), filtered.groups_dropped, filtered.dropped["all_equal"]) == (3, 1, 1)
    assert [item.row.advantage for item in filtered.rows] == [item.row.advantage for item in alone.rows]
    assert equal.trajectories[0].meta["advantage"] == 0.0


def test_without_a_filter_nothing_is_resampled(world, tmp_path):
    trainer_for(world, tmp_path, scorer=picky_reward, max_steps=2).train()
    lines = read_metrics(tmp_path)
    assert [(line["groups"], line["resampling_rounds"], line["groups_missing"]) for line in lines] == [
        (2, 0, 0), (2, 0, 0),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="max_resampling_rounds needs filter_zero_std_groups"):
        GrpoConfig(model_name_or_path="m", output_dir="o", corpus="c", questions="q", max_resampling_rounds=1)


def test_groups_that_all_train_need_no_round(world, tmp_path):
    trainer_for(world, tmp_path, scorer=spread_reward, max_steps=1, **RESAMPLE).train()
    (line,) = read_metrics(tmp_path)
    assert (line["groups"], line["groups_dropped"], line["resampling_rounds"]) == (2, 0, 0)
