from enum import StrEnum
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, Field

from visor.config import Config, ConfigError, load_config, parse_cli


class Mode(StrEnum):
    FAST = "fast"
    SLOW = "slow"


class Optim(Config):
    lr: float = 1e-5
    """Peak learning rate."""
    betas: list[float] = [0.9, 0.99]


class Run(Config):
    name: str = "run"
    steps: int = Field(default=10, ge=1)
    """Optimiser steps."""
    window: int | None = 2
    verbose: bool = False
    mode: Mode = Mode.FAST
    kind: Literal["a", "b"] = "a"
    output: Path | None = None
    resume: bool | str = False
    optim: Optim = Optim()
    stages: list[Optim] = []
    named: dict[str, Optim] = {}
    extra: dict[str, int] = {}


class Needy(BaseModel):
    data: str


def write(tmp_path, text, name="run.yaml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_alone():
    assert load_config(Run, None, []) == Run()


def test_file_then_overrides(tmp_path):
    path = write(tmp_path, "steps: 5\nname: first\noptim:\n  lr: 1e-6\n")
    config = load_config(Run, path, ["--name", "second", "--optim.betas=[0.5, 0.6]"])
    assert (config.steps, config.name, config.optim.lr, config.optim.betas) == (5, "second", 1e-6, [0.5, 0.6])


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["--steps", "7"], "steps", 7),
        (["--steps=7"], "steps", 7),
        (["--window", "null"], "window", None),
        (["--window", "3"], "window", 3),
        (["--verbose"], "verbose", True),
        (["--verbose", "false"], "verbose", False),
        (["--verbose", "--steps", "7"], "verbose", True),
        (["--name", "1.0"], "name", "1.0"),
        (["--name", "on"], "name", "on"),
        (["--name", ""], "name", ""),
        (["--name", "a=b: {c"], "name", "a=b: {c"),
        (["--name=--x"], "name", "--x"),
        (["--mode", "slow"], "mode", Mode.SLOW),
        (["--kind", "b"], "kind", "b"),
        (["--output", "runs/1"], "output", Path("runs/1")),
        (["--output", "null"], "output", None),
        (["--resume", "true"], "resume", True),
        (["--resume", "runs/1"], "resume", "runs/1"),
        (["--optim.lr", "1e-6"], "optim", Optim(lr=1e-6)),
        (["--optim.lr", "-1"], "optim", Optim(lr=-1)),
        (["--optim", "{lr: 2}"], "optim", Optim(lr=2)),
        (["--stages", "[{lr: 3}]"], "stages", [Optim(lr=3)]),
        (["--extra.some-key", "4"], "extra", {"some-key": 4}),
        (["--named.x.lr", "4"], "named", {"x": Optim(lr=4)}),
        (["--steps", "7", "--steps", "8"], "steps", 8),
    ],
)
def test_override_values_take_the_type_of_the_field(arguments, field, value):
    got = getattr(load_config(Run, None, arguments), field)
    assert got == value
    assert type(got) is type(value)


def test_a_hyphen_stands_for_an_underscore():
    class Underscored(Config):
        batch_size: int = 1

    assert load_config(Underscored, None, ["--batch-size", "3"]).batch_size == 3


@pytest.mark.parametrize(
    ("text", "unknown", "near"),
    [
        ("stepz: 3", "stepz", "steps"),
        ("optim:\n  lrr: 3", "optim.lrr", "optim.lr"),
        ("stages:\n- lr: 1\n- beta: [1]", "stages.1.beta", "stages.1.betas"),
        ("named:\n  x:\n    l: 1", "named.x.l", "named.x.lr"),
    ],
)
def test_unknown_key_in_file_names_file_and_nearest(tmp_path, text, unknown, near):
    with pytest.raises(ConfigError) as error:
        load_config(Run, write(tmp_path, text), [])
    assert "run.yaml" in str(error.value)
    assert f"unknown key {unknown!r}; did you mean {near!r}?" in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "unknown", "near"),
    [
        (["--stepz", "3"], "stepz", "steps"),
        (["--stepz"], "stepz", "steps"),
        (["--optim.lrr=3"], "optim.lrr", "optim.lr"),
        (["--optim", "{lrr: 3}"], "optim.lrr", "optim.lr"),
    ],
)
def test_unknown_key_on_the_command_line(arguments, unknown, near):
    with pytest.raises(ConfigError, match="command line") as error:
        load_config(Run, None, arguments)
    assert f"unknown key {unknown!r}; did you mean {near!r}?" in str(error.value)


def test_unknown_key_is_refused_even_where_the_model_would_ignore_it(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'data'"):
        load_config(Needy, write(tmp_path, "data: x\ndate: y"), [])


def test_bad_value_names_source_key_and_type(tmp_path):
    path = write(tmp_path, "steps: many\n")
    with pytest.raises(ConfigError, match=r"run\.yaml: steps = 'many': .*\(expected int\)"):
        load_config(Run, path, [])
    with pytest.raises(ConfigError, match=r"command line: steps = 0: .*greater than or equal to 1"):
        load_config(Run, path, ["--steps", "0"])
    with pytest.raises(ConfigError, match=r"command line: window = 'x': .*\(expected int or null\)"):
        load_config(Run, None, ["--window", "x"])
    with pytest.raises(ConfigError, match=r"command line: kind = 'c': .*\(expected a\|b\)"):
        load_config(Run, None, ["--kind", "c"])


def test_missing_required_field_is_named():
    with pytest.raises(ConfigError, match=r"data is required \(expected str\)"):
        load_config(Needy, None, [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b", "key: value"),
        ("steps: [1", "not valid YAML"),
        ("steps: 1\nsteps: 2", "'steps' twice, line 2"),
        ("optim:\n  lr: 1\n  lr: 2", "'lr' twice, line 3"),
    ],
)
def test_unusable_files_are_named(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as error:
        load_config(Run, write(tmp_path, text), [])
    assert "run.yaml" in str(error.value)


def test_no_such_file(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_config(Run, tmp_path / "nowhere.yaml", [])


def test_empty_file_and_byte_order_mark(tmp_path):
    assert load_config(Run, write(tmp_path, "# nothing\n"), []) == Run()
    assert load_config(Run, write(tmp_path, "\ufeffsteps: 3\n"), []).steps == 3


@pytest.mark.parametrize("arguments", [["steps", "3"], ["--steps"], ["--steps.x", "3"], ["--"]])
def test_malformed_overrides(arguments):
    with pytest.raises(ConfigError, match="command line"):
        load_config(Run, None, arguments)


def test_parse_cli_reads_config_and_overrides(tmp_path):
    path = write(tmp_path, "steps: 5")
    assert parse_cli(Run, ["--name", "x", "--config", str(path), "--verbose"], "train").steps == 5
    assert parse_cli(Run, [f"--config={path}", "--steps", "6"], "train").steps == 6


def test_parse_cli_help_lists_every_field(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_cli(Run, ["--help"], "train", "Trains.")
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert "Trains." in out
    for name in Run.model_fields:
        assert f"--{name}" in out
    assert "--optim.lr float  (default: 1e-05)" in out
    assert "Peak learning rate." in out


def test_parse_cli_reports_mistakes_without_traceback(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_cli(Run, ["--stepz", "1"], "train")
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("train: error: command line: unknown key 'stepz'")
    with pytest.raises(SystemExit):
        parse_cli(Run, ["--config", "a", "--config", "b"], "train")


def test_import_is_light():
    import subprocess
    import sys

    code = "import visor.config, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
