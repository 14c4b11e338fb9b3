import os
import signal
import subprocess
import sys

import pytest

from grpo.checkpoint import (
    checkpoints,
    clear_leftovers,
    drop_after,
    drop_old,
    latest_checkpoint,
    save_atomically,
    step_of,
)


def write_two_files(folder):
    (folder / "a").write_text("1")
    (folder / "sub").mkdir()
    (folder / "sub" / "b").write_text("2")


def test_a_checkpoint_appears_whole(tmp_path):
    path = save_atomically(tmp_path, 3, write_two_files)
    assert path.name == "checkpoint-3"
    assert (path / "sub" / "b").read_text() == "2"
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-3"]


def test_an_interrupted_write_leaves_the_earlier_checkpoint(tmp_path):
    save_atomically(tmp_path, 1, write_two_files)

    def broken(folder):
        write_two_files(folder)
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        save_atomically(tmp_path, 2, broken)
    assert latest_checkpoint(tmp_path).name == "checkpoint-1"
    assert save_atomically(tmp_path, 2, write_two_files) == latest_checkpoint(tmp_path)


def test_kill_while_writing_leaves_no_half_checkpoint(tmp_path):
    save_atomically(tmp_path, 1, write_two_files)
    code = (
        "import sys, time; from pathlib import Path; from grpo.checkpoint import save_atomically\n"
        "def write(folder):\n"
        "    (folder / 'weights').write_text('half'); print('writing', flush=True); time.sleep(60)\n"
        "save_atomically(Path(sys.argv[1]), 2, write)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert [step for step, _ in checkpoints(tmp_path)] == [1]


def test_steps_sort_as_numbers_and_old_ones_go(tmp_path):
    for step in (10, 9, 100):
        save_atomically(tmp_path, step, write_two_files)
    assert [step for step, _ in checkpoints(tmp_path)] == [9, 10, 100]
    drop_old(tmp_path, None)
    drop_old(tmp_path, 2)
    assert [step for step, _ in checkpoints(tmp_path)] == [10, 100]


def test_a_folder_of_another_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match="checkpoint-<step>"):
        step_of(tmp_path)
    assert latest_checkpoint(tmp_path / "absent") is None


def test_a_checkpoint_that_is_being_deleted_is_none(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        save_atomically(tmp_path, step, write_two_files)

    class Killed(BaseException):
        pass

    def killed(*_, **__):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", killed)
        with pytest.raises(Killed):
            drop_after(tmp_path, 2)
    assert [step for step, _ in checkpoints(tmp_path)] == [1, 2]
    (tmp_path / ".tmp-checkpoint-4").mkdir()
    clear_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2"]
