"""Alarms: pure functions of the metrics lines, and what a run does about them."""

import json

import pytest
import yaml
from training_world import grpo_settings, read_metrics, trainer_for

from grpo.alarms import NAMES, AlarmsConfig, newly_raised, standing
from grpo.arguments import GrpoConfig
from grpo.trainer import StoppedByAlarm
from visor.types import RewardBreakdown

GOOD = {
    "entropy": 1.0, "trained_tokens": 100, "kl": 0.01, "groups": 8, "groups_dropped": 1,
    "over_search_share": 0.1, "invalid_action_rate": 0.0,
}  # fmt: skip
SETTINGS = AlarmsConfig(patience=3, entropy_first_steps=2, kl_patience=2)


def rows(*changes: dict) -> list[dict]:
    return [{**GOOD, "step": step, **change} for step, change in enumerate(changes, start=1)]


def names(lines: list[dict], settings: AlarmsConfig = SETTINGS) -> list[str]:
    return [alarm.name for alarm in standing(lines, settings)]


BAD = {
    "entropy_collapse": {"entropy": 0.19},
    "no_reward_variance": {"groups_dropped": 8},
    "over_searching": {"over_search_share": 0.81},
    "falling_format": {"invalid_action_rate": 0.51},
}


@pytest.mark.parametrize("name", BAD)
def test_an_alarm_needs_patience(name):
    bad = BAD[name]
    assert names(rows({}, {}, bad, bad)) == []
    assert names(rows({}, {}, bad, bad, bad)) == [name]
    assert names(rows({}, {}, bad, {}, bad, bad)) == []
    assert names(rows({}, {}, bad, bad, bad, {})) == []


@pytest.mark.parametrize(
    ("name", "border"),
    [
        ("entropy_collapse", {"entropy": 0.2}),
        ("no_reward_variance", {"groups": 10, "groups_dropped": 9}),
        ("over_searching", {"over_search_share": 0.8}),
        ("falling_format", {"invalid_action_rate": 0.5}),
    ],
)
def test_a_figure_at_the_threshold_is_none(name, border):
    assert names(rows({}, {}, *[border] * 5)) == []


def test_kl_has_a_patience_of_its_own():
    assert names(rows({"kl": 480.0}, {})) == names(rows({}, {"kl": 480.0})) == []
    assert names(rows({}, {"kl": 1.1}, {"kl": 1.2})) == ["kl_blow_up"]
    assert names(rows({}, {"kl": None}, {"kl": None})) == []


def test_entropy_is_compared_with_the_first_steps_that_trained():
    nothing = {"entropy": 0.0, "trained_tokens": 0}
    # The mean over steps 2 and 3 is 2, so the floor is 0.4.
    start = [nothing, {"entropy": 1.0}, {"entropy": 3.0}]
    assert names(rows(*start, *[{"entropy": 0.41}] * 3)) == []
    assert names(rows(*start, *[{"entropy": 0.39}] * 3)) == ["entropy_collapse"]
    assert names(rows(*start, {"entropy": 0.39}, nothing, {"entropy": 0.39})) == []
    assert names(rows(*[nothing] * 9)) == []
    # The first steps are no collapse of themselves.
    assert names(rows({"entropy": 10.0}, {"entropy": 0.1}, {"entropy": 0.1}, {"entropy": 0.1})) == []


def test_missing_figures_and_thresholds_switched_off():
    assert standing([], SETTINGS) == []
    assert names([{"step": step} for step in range(1, 9)]) == []
    bad = {"kl": 9.0, **{key: value for change in BAD.values() for key, value in change.items()}}
    lines = rows({}, {}, *[bad] * 3)
    assert names(lines) == list(NAMES)
    thresholds = (
        "entropy_fraction",
        "kl",
        "groups_dropped_share",
        "over_search_share",
        "invalid_action_rate",
    )
    off = dict.fromkeys(thresholds)
    assert names(lines, SETTINGS.model_copy(update=off)) == []


def test_an_alarm_is_raised_once_until_it_returns():
    bad, good = BAD["over_searching"], {}
    lines = rows(*[bad] * 5, good, *[bad] * 4)
    assert raised_steps(lines, SETTINGS) == [3, 9]


def raised_steps(lines: list[dict], settings: AlarmsConfig, after: int = 0) -> list[int]:
    """The steps at which a run raises an alarm, each line naming those that stand, as the trainer does."""
    raised = []
    for end in range(after + 1, len(lines) + 1):
        alarms = standing(lines[:end], settings)
        lines[end - 1]["alarms"] = [alarm.name for alarm in alarms]
        raised += [lines[end - 1]["step"]] if newly_raised(alarms, lines[:end]) else []
    return raised


def test_stricter_thresholds_raise_an_alarm_that_old_lines_did_not_name():
    lines = rows(*[{"over_search_share": 0.5}] * 6)
    assert raised_steps(lines[:4], SETTINGS) == []
    strict = SETTINGS.model_copy(update={"over_search_share": 0.4})
    assert raised_steps(lines, strict, after=4) == [5]


def test_the_message_says_what_and_why():
    (alarm,) = standing(
        rows({}, {}, *[{"over_search_share": share} for share in (0.9, 0.85, 0.95)]), SETTINGS
    )
    assert "over_searching at step 5: over_search_share 0.95, above 0.8 for 3 steps (from 0.85 to 0.95)" in (
        alarm.message
    )
    assert "Usual cause: the policy goes on searching" in alarm.message
    assert "Try: " in alarm.message


def test_the_defaults_let_the_usual_over_searching_of_a_start_pass():
    """Over-searching rises to 0.7 and recovers, and KL has single steps of one token's doing."""
    hump = [{"over_search_share": 0.7, "kl": 2.6 if step % 2 else 0.1} for step in range(15)]
    assert names(rows(*[{}] * 10, *hump, *[{}] * 10), AlarmsConfig()) == []


# ---------------------------------------------------------------- in a run


def same(trajectory, question, judge):
    return RewardBreakdown(total=0.5)


QUICK = {"patience": 2, "invalid_action_rate": None}  # the random policy cannot act


def test_alarms_are_logged_and_printed_once(world, tmp_path, capsys):
    settings = {"alarms": QUICK, "save_steps": 1}
    trainer_for(world, tmp_path, scorer=same, max_steps=3, **settings).train()
    trainer_for(world, tmp_path, scorer=same, max_steps=4, **settings).train()  # standing alarms stay quiet
    logged = [line["alarms"] for line in read_metrics(tmp_path)]
    assert logged == [[]] + [["no_reward_variance"]] * 3
    shown = capsys.readouterr().out
    assert shown.count("alarm no_reward_variance at step 2") == shown.count("alarm ") == 1


def test_an_alarm_stops_the_run_which_can_go_on(world, tmp_path):
    settings = {"alarms": QUICK, "max_steps": 4, "stop_on_alarm": "all"}
    with pytest.raises(StoppedByAlarm, match=r"after step 2 by no_reward_variance.*checkpoint-2"):
        trainer_for(world, tmp_path, scorer=same, **settings).train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert not (tmp_path / "model.safetensors").exists()
    checkpoint = str(tmp_path / "checkpoint-2")
    resumed = trainer_for(
        world, tmp_path, scorer=same, **settings, resume_from_checkpoint=checkpoint, learning_rate=1e-4
    )
    resumed.train()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert read_metrics(tmp_path)[-1]["learning_rate"] == 1e-4


def test_an_alarm_that_is_not_named_does_not_stop(world, tmp_path):
    settings = {"alarms": QUICK, "max_steps": 3, "stop_on_alarm": ["kl_blow_up"]}
    trainer_for(world, tmp_path, scorer=same, **settings).train()
    assert read_metrics(tmp_path)[-1]["alarms"] == ["no_reward_variance"]


def test_the_command_ends_with_status_3(world, tmp_path, capsys):
    from grpo.train import main

    settings = grpo_settings(
        world, tmp_path / "run", alarms={"patience": 1}, stop_on_alarm="falling_format", max_steps=2
    )  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(SystemExit) as stopped:
        main(["--config", str(tmp_path / "run.yaml")])
    assert stopped.value.code == 3
    assert "grpo.train: stopped after step 1 by falling_format" in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "checkpoint-1" / "trainer_state.json").read_text())["step"] == 1


def test_names_of_alarms(world, tmp_path):
    def parsed(value):
        return GrpoConfig(**grpo_settings(world, tmp_path, stop_on_alarm=value)).stop_on_alarm

    assert parsed("all") == list(NAMES)
    assert parsed("none") == parsed(None) == parsed([]) == []
    assert parsed("kl_blow_up") == parsed(["kl_blow_up"]) == ["kl_blow_up"]
    with pytest.raises(ValueError, match=r"unknown alarm 'kl'; known: entropy_collapse, kl_blow_up"):
        parsed(["kl"])
