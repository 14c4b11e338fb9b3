"""Runs that are killed with -9 and go on, and whether they equal one that was not.

As a program it forks a process for each run it is told of, so that the libraries are loaded once. A line of
stdin is a command, {"world", "out", "settings", "kill_before" (number of a disk operation, from 1),
"kill_after" (seconds)}; a line of stdout its outcome, {"killed", "operations", "seconds"}.
"""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

OPERATIONS = ("fsync", "truncate", "rename", "replace", "unlink", "rmdir", "mkdir")
"""Functions of `os` that everything goes through which makes a file last, moves it or takes it away."""
SECONDS = re.compile(r", [\d.]+ s\)")
TIMES = {"seconds", "wall_seconds", "retrieval_seconds"}


class Runner:
    """The program, started once for many runs in folders of one world."""

    def __init__(self, world: Path, settings: dict) -> None:
        self.world, self.settings = world, settings
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip

    def run(self, out: Path, **kill) -> dict:
        """Train in `out` until the end or the kill."""
        command = {"world": str(self.world), "out": str(out), "settings": self.settings, **kill}
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the runner ended"
        outcome = json.loads(line)
        log = out.with_suffix(".log")
        assert outcome["killed"] or outcome["status"] == 0, log.read_text()[-3000:]
        return outcome

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.stdin.close()
        self.process.wait()


def contents(out: Path) -> dict:
    """What a finished run left: every figure, sample and weight, and the names of all its files."""
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*"))
    records = {
        name: [_timeless(json.loads(line)) for line in (out / name).read_text().splitlines()]
        for name in files
        if name.endswith(".jsonl")
    }
    texts = {
        name: SECONDS.sub("", (out / name).read_text())
        for name in files
        if name.endswith((".json", ".txt")) and name != "run_config.json"  # it names the folder
    }
    weights = {name: load_file(out / name) for name in files if name.endswith(".safetensors")}
    states = {name: torch.load(out / name, weights_only=True) for name in files if name.endswith(".pt")}
    return {"files": files, "records": records, "texts": texts, "weights": weights, "states": states}


def same(first, second) -> bool:
    """Equality to the bit, tensors inside included."""
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


def check_same(whole: dict, resumed: dict) -> None:
    """AssertionError with the name of what differs."""
    assert resumed["files"] == whole["files"]
    for kind in ("records", "texts", "weights", "states"):
        differing = [name for name in whole[kind] if not same(whole[kind][name], resumed[kind][name])]
        assert not differing, f"{kind} that differ: {differing}"


def _timeless(record):
    if isinstance(record, dict):
        return {key: _timeless(value) for key, value in record.items() if key not in TIMES}
    return [_timeless(value) for value in record] if isinstance(record, list) else record


# ---------------------------------------------------------------- the program


def _count_and_kill(kill_before: int | None) -> list[int]:
    """Count the disk operations of this process, and end it right before one of them."""
    done = [0]

    def counted(operation):
        def call(*arguments, **options):
            done[0] += 1
            if done[0] == kill_before:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*arguments, **options)

        return call

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))
    return done


def _train(command: dict) -> None:
    from training_world import picky_reward, trainer_for

    out = Path(command["out"])
    log = os.open(out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    done = _count_and_kill(command.get("kill_before"))
    trainer_for(Path(command["world"]), out, picky_reward, **command["settings"]).train()
    out.with_suffix(".operations").write_text(str(done[0]))


def _run(command: dict) -> dict:
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _train(command)
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    deadline = started + command.get("kill_after", float("inf"))
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.002)
    operations = Path(command["out"]).with_suffix(".operations")
    return {
        "killed": os.WIFSIGNALED(status),
        "status": None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status),
        "operations": int(operations.read_text()) if operations.exists() else None,
        "seconds": time.monotonic() - started,
    }


if __name__ == "__main__":
    outcomes = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print, too
    # What a run loads, once and before the forks.
    for name in ("grpo.build", "training_world", "deepspeed", "transformers.video_processing_utils"):
        if importlib.util.find_spec(name):
            importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), file=outcomes, flush=True)
