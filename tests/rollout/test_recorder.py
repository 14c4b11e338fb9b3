import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rollout.recorder import Recorder, read_lines, rewrite
from visor.types import Trajectory

CASES = Path(__file__).parents[2].parent / "shared" / "cases" / "files"


def by_id(record):
    return (record["id"],)


def records_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_torn_last_line_is_asked_again_and_nothing_else(tmp_path):
    """Case H2."""
    if not CASES.exists():
        pytest.skip("the shared cases folder is absent")
    path = tmp_path / "results.jsonl"
    shutil.copyfile(CASES / "partial_results.jsonl", path)
    path.chmod(0o644)
    questions = [json.loads(line) for line in (CASES / "partial_questions.jsonl").read_text().splitlines()]
    asked = []
    with Recorder(path, key=by_id) as recorder:
        for question in questions:
            if (question["id"],) not in recorder.done:
                asked.append(question["id"])
                recorder.append({"id": question["id"], "pred": "x", "correct": True})
    assert asked == ["r3", "r4"]
    assert [record["id"] for record in records_of(path)] == ["r0", "r1", "r2", "r3", "r4"]


def test_every_cut_of_a_file_resumes_to_the_same_rows(tmp_path):
    """Slow obvious version: cut the file after each byte, resume, compare with an unbroken run."""
    rows = [{"id": "é1", "text": 'a "quote"\n'}, {"id": "2", "text": ""}, {"id": "3", "text": "漢"}]
    whole = tmp_path / "whole.jsonl"
    with Recorder(whole, key=by_id) as recorder:
        for record in rows:
            recorder.append(record)
    data = whole.read_bytes()
    for length in range(len(data) + 1):
        path = tmp_path / "cut.jsonl"
        path.write_bytes(data[:length])
        with Recorder(path, key=by_id) as recorder:
            for record in rows:
                if (record["id"],) not in recorder.done:
                    recorder.append(record)
        assert path.read_bytes() == data, f"cut after {length} bytes"


def test_no_row_twice(tmp_path):
    path = tmp_path / "t.jsonl"
    with Recorder(path) as recorder:
        recorder.append(Trajectory(question_id="a", question="?"))
        recorder.append(Trajectory(question_id="a", question="?", sample_index=1))
        with pytest.raises(ValueError, match="already has a row"):
            recorder.append(Trajectory(question_id="a", question="?"))
    assert len(list(read_lines(path))) == 2
    path.write_text(path.read_text() * 2)
    with pytest.raises(ValueError, match="two rows for"):
        Recorder(path)


def test_damage_before_the_last_line_is_named(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"id": "a"}\n{"id": \n{"id": "c"}\n')
    with pytest.raises(ValueError, match=r"t\.jsonl, line 2"):
        Recorder(path, key=by_id)
    with pytest.raises(ValueError, match="line 2"):
        list(read_lines(path))


def test_two_writers_are_refused(tmp_path):
    path = tmp_path / "t.jsonl"
    with Recorder(path), pytest.raises(ValueError, match="another process"):
        Recorder(path)
    Recorder(path).close()


def test_nan_is_refused_rather_than_written_as_invalid_json(tmp_path):
    with Recorder(tmp_path / "t.jsonl", key=by_id) as recorder, pytest.raises(ValueError, match="JSON"):
        recorder.append({"id": "a", "x": float("nan")})


def test_rows_are_on_disk_before_a_kill(tmp_path):
    """A process that dies without a word leaves every appended row."""
    path = tmp_path / "t.jsonl"
    program = (
        "import os, sys; from rollout.recorder import Recorder\n"
        "recorder = Recorder(sys.argv[1])\n"
        "[recorder.append({'question_id': str(i)}) for i in range(3)]\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], cwd=Path(__file__).parents[2])
    assert done.returncode == -9
    assert [record["question_id"] for record in read_lines(path)] == ["0", "1", "2"]


def test_rewrite_replaces_the_file(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("old")
    rewrite(path, iter([{"id": "a"}]))
    assert records_of(path) == [{"id": "a"}]
    assert [p.name for p in tmp_path.iterdir()] == ["t.jsonl"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("other.jsonl", '{"name": "x"}\n', r"other\.jsonl holds other records: one has no 'question_id'"),
        ("notes.txt", "my notes, one line", r"notes.txt, line 1: not a JSON object"),
    ],
)
def test_a_file_of_something_else_is_refused_and_left_as_it_is(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        Recorder(path)
    assert path.read_text() == content


def test_a_lone_surrogate_is_a_row_like_any_other(tmp_path):
    record = {"id": "a", "text": "half \ud83d, \\ud83d, é"}
    with Recorder(tmp_path / "rows.jsonl", key=by_id) as recorder:
        recorder.append(record)
    rewrite(tmp_path / "again.jsonl", read_lines(tmp_path / "rows.jsonl"))
    assert list(read_lines(tmp_path / "again.jsonl")) == [record]


def test_a_row_that_cannot_be_synced_ends_the_run(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path / "rows.jsonl", key=by_id)
    synced = threading.Event()

    def full(_):
        synced.set()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("rollout.recorder.os.fsync", full)
        recorder.append({"id": "a"})
        assert synced.wait(10)
        recorder._thread.shutdown()
        with pytest.raises(OSError, match="No space left"):
            recorder.append({"id": "b"})
        with pytest.raises(OSError, match="No space left"):
            recorder.close()
    assert records_of(tmp_path / "rows.jsonl") == [{"id": "a"}]


def test_waiting_rows_share_a_sync_and_the_last_is_synced_without_another(tmp_path, monkeypatch):
    release, sizes = threading.Event(), []
    path, sync = tmp_path / "rows.jsonl", os.fsync

    def slow(descriptor):
        sizes.append(path.read_bytes().count(b"\n"))
        release.wait(10)
        sync(descriptor)

    monkeypatch.setattr("rollout.recorder.os.fsync", slow)
    recorder = Recorder(path, key=by_id)
    for number in range(20):
        recorder.append({"id": str(number)})
    release.set()
    recorder._thread.shutdown()
    assert sizes[-1] == 20
    assert len(sizes) <= 3
    recorder.close()
