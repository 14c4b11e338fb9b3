import json

import pytest

from rollout.trajectory_file import read_trajectories, refuse_own_input, trajectories_path
from visor.types import Trajectory

RECORD = Trajectory(question_id="q", question="?").model_dump_json() + "\n"


def test_a_file_and_the_run_folder_that_holds_it_read_the_same(tmp_path):
    file = tmp_path / "trajectories.jsonl"
    file.write_text(RECORD + '{"question_id": "torn')
    assert trajectories_path(tmp_path) == trajectories_path(file) == file
    assert list(read_trajectories(tmp_path)) == list(read_trajectories(file))
    assert [t.question_id for t in read_trajectories(file)] == ["q"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            RECORD + "\n" + json.dumps({"question_id": "q1", "text": "a question"}) + "\n",
            r"line 3: not a traj",
        ),
        ('{"name": "x"}\n', r"file\.jsonl, line 1: not a trajectory \(question_id: Field required\)"),
        ("", "holds no trajectory"),
        ("a text\n", "line 1: not a JSON object"),
    ],
)
def test_what_is_no_trajectory_is_named_with_its_line(tmp_path, text, message):
    file = tmp_path / "file.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        list(read_trajectories(file))


def test_a_missing_file_and_a_folder_without_one(tmp_path):
    for path in (tmp_path, tmp_path / "gone"):
        with pytest.raises(ValueError, match="no such file of trajectories"):
            list(read_trajectories(path))


def test_an_input_is_never_the_output(tmp_path):
    file, link = tmp_path / "trajectories.jsonl", tmp_path / "link.jsonl"
    file.write_text(RECORD)
    link.symlink_to(file)
    refuse_own_input(tmp_path, tmp_path / "other.jsonl")
    for source, output in ((file, file), (tmp_path, file), (file, link)):
        with pytest.raises(ValueError, match="is the input as well"):
            refuse_own_input(source, output)
