"""What filter, augment and export take, and how they refuse it."""

import json

import pytest
from training_world import answer, search

from sft import augment, export, filter

WORDS = ["filter", "augment", "export"]


def command(name, source, output, world):
    """Run one of the commands; returns its exit status."""
    questions = f"questions:{world / 'questions.jsonl'}"
    arguments = {
        "filter": [str(source), "--questions", questions, "-o", str(output)],
        "augment": ["--input", str(source), "--questions", questions, "--output", str(output)],
        "export": [str(source), "-o", str(output)],
    }[name]
    if name == "augment":
        script = output.with_name("script.jsonl")
        script.write_text(json.dumps({"question": "unused", "replies": ["x"]}) + "\n")
        arguments += ["--corpus", str(world / "corpus"), "--model", f"script:{script}"]
    module = {"filter": filter, "augment": augment, "export": export}[name]
    try:
        module.main(arguments)
    except SystemExit as stop:
        return stop.code
    return 0


@pytest.fixture
def run(play, tmp_path):
    """A run folder with one good trajectory."""
    (tmp_path / "run").mkdir()
    record = play([search("apple number"), answer("1")]).model_dump_json()
    (tmp_path / "run" / "trajectories.jsonl").write_text(record + "\n")
    return tmp_path / "run"


@pytest.mark.parametrize("name", WORDS)
def test_a_run_folder_is_read(name, run, world, tmp_path, capsys):
    assert command(name, run, tmp_path / "out.jsonl", world) == 0
    expected = {
        "filter": "1 of 1 trajectories kept",
        "augment": "of 1 trajectories",
        "export": "1 rows written",
    }
    assert expected[name] in capsys.readouterr().out


@pytest.mark.parametrize("name", WORDS)
def test_another_file_is_named_with_its_line(name, world, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    out.write_text("kept\n")
    assert command(name, world / "questions.jsonl", out, world) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sft.{name}: error: {world / 'questions.jsonl'}, line 1: not a trajectory (")
    assert out.read_text() == "kept\n"


@pytest.mark.parametrize("name", WORDS)
def test_the_input_is_not_the_output(name, run, world, capsys):
    file = run / "trajectories.jsonl"
    before = file.read_text()
    assert command(name, run, file, world) == 2
    assert "is the input as well" in capsys.readouterr().err
    assert file.read_text() == before


@pytest.mark.parametrize("name", ["filter", "augment"])
def test_trajectories_of_other_questions(name, run, world, tmp_path, capsys):
    file = run / "trajectories.jsonl"
    record = json.loads(file.read_text()) | {"question_id": "elsewhere"}
    file.write_text(json.dumps(record) + "\n")
    assert command(name, run, tmp_path / "out.jsonl", world) == 2
    assert "lacks questions of the trajectories, such as ['elsewhere']" in capsys.readouterr().err
