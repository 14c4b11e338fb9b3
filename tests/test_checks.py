"""`scripts/check` and the pre-commit hooks: the same commands, all of them there, all able to fail."""

import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
HOOKS = {
    hook["id"]: hook
    for repository in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in repository["hooks"]
}


def run(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def checked() -> set[str]:
    """The commands of `scripts/check`, without the folder they are given."""
    lines = (ROOT / "scripts" / "check").read_text().splitlines()
    return {line.removesuffix(" .") for line in lines if line.startswith(".venv/bin/")}


def test_nothing_is_downloaded():
    assert all(hook["language"] == "system" for hook in HOOKS.values())
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]


def test_the_hooks_are_the_commands_of_the_check_and_the_import_rules():
    imports = ".venv/bin/python -m pytest tests/test_imports.py"
    assert {hook["entry"] for hook in HOOKS.values()} == checked() | {imports}


def test_continuous_integration_checks_first():
    lines = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if "make " in line]
    assert lines == ["make check", "make test"]


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS.keys())
def test_the_program_of_each_hook_runs(hook):
    program, *arguments = shlex.split(hook["entry"])
    if not (ROOT / program).exists():
        pytest.skip(f"{program} is not on this machine: the environment is another one than .venv")
    for argument in arguments:
        assert not argument.startswith("tests/") or (ROOT / argument).is_file()
    module = arguments[:2] if arguments[:1] == ["-m"] else []
    assert run([program, *module, "--version"]).returncode == 0


@pytest.mark.parametrize(("hook", "text"), [("ruff-check", "import os\n"), ("ruff-format", "x=1\n")])
def test_the_hooks_of_single_files_can_fail(hook, text, tmp_path):
    program = shlex.split(HOOKS[hook]["entry"])
    if not (ROOT / program[0]).exists():
        pytest.skip(f"{program[0]} is not on this machine: the environment is another one than .venv")
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text("x = 1\n")
    bad.write_text(text)
    assert run([*program, str(good)]).returncode == 0
    assert run([*program, str(bad)]).returncode == 1


def test_the_types_of_a_record_are_checked(tmp_path):
    """Pydantic's plugin is on: a field of the wrong type is found."""
    program = ROOT / ".venv" / "bin" / "mypy"
    if not program.exists():
        pytest.skip("mypy is not on this machine: the environment is another one than .venv")
    wrong = tmp_path / "wrong.py"
    wrong.write_text('from visor.types import Question\n\nQuestion(question_id=1, text="q", nosuch=2)\n')
    found = run([str(program), "--cache-dir", str(tmp_path), str(wrong)]).stdout
    assert 'Argument "question_id" to "Question" has incompatible type "int"' in found
    assert 'Unexpected keyword argument "nosuch"' in found
