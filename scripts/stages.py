"""Stages of a long job: commands, the files they write, and marks that say which of them are finished.

A finished stage leaves a mark under `ROOT/stages`; run again after an interruption, a job goes on after the
last mark. A mark holds only for the same commands and the same configuration files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

LAUNCH = "accelerate launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no"
"""What starts `sft` on a CPU."""


class StageFailed(SystemExit):
    """A command of a stage failed; the message says which. Uncaught, it ends the program with status 1."""


@dataclass(frozen=True)
class Stage:
    name: str
    """Also the name of its mark; may hold slashes."""
    group: str
    """What its seconds are summed under."""
    commands: tuple[str, ...]
    outputs: tuple[str, ...]
    """Files and folders under the job's root, removed before the stage starts anew."""
    parallel: int = 1
    """Commands that run at the same time."""
    after: tuple[str, ...] = ()
    """Names of the stages whose outputs it needs, for a job that is no plain sequence."""


def stage_digest(stage: Stage, before: str) -> str:
    """Identity of a stage's result: its commands, their configuration files, and all that came before."""
    digest = hashlib.sha256(before.encode())
    for command in stage.commands:
        digest.update(command.encode())
        for word in shlex.split(command):
            if word.startswith("configs/"):
                digest.update(_settings(Path(word)))
    return digest.hexdigest()[:16]


def _settings(path: Path) -> bytes:
    """A configuration file without its comments and its order of keys."""
    return json.dumps(yaml.safe_load(path.read_text(encoding="utf-8")), sort_keys=True).encode()


def read_mark(root: Path, name: str) -> dict:
    """The mark of a stage: digest, done, seconds, code; empty when it never started."""
    mark = root / "stages" / f"{name}.json"
    return json.loads(mark.read_text()) if mark.exists() else {}


def run_stage(
    stage: Stage, digest: str, root: Path, code: str = "", log: Path | None = None, quiet: bool = False
) -> float:
    """Run a stage unless its mark is there; returns the seconds that it took, then or now.

    `root`: folder of the marks and outputs. The mark must carry this digest and this `code`, which names the
    code that ran, where the digest does not hold it already. `log`: file that gets the commands' output, for
    stages that run side by side; `quiet`: say nothing of a stage that was done before. Raises StageFailed.

    A stage that was interrupted is continued, not started anew: its commands resume by themselves. Commands
    that a killed demo left running are ended first. The seconds of all attempts count.
    """
    mark = root / "stages" / f"{stage.name}.json"
    state = read_mark(root, stage.name)
    end_processes(state.get("processes", []))
    identity = {"digest": digest, "code": code}
    same = (state.get("digest"), state.get("code", "")) == (digest, code)
    if same and state["done"]:
        if not quiet:
            print(f"[{stage.name}] done before in {state['seconds']:.0f} s", flush=True)
        return state["seconds"]
    if not same:
        state = identity | {"done": False, "seconds": 0.0}
        for output in stage.outputs:
            remove(root / output)
    started = time.monotonic() - state["seconds"]
    waiting, running = list(stage.commands), []
    while waiting or running:
        while waiting and len(running) < stage.parallel:
            command = waiting.pop(0)
            print(f"[{stage.name}] $ {command}", flush=True)
            running.append((command, _start(command, log)))
        state["seconds"] = time.monotonic() - started
        state["processes"] = [(process.pid, process.create_time()) for _, process in running]
        _write(mark, state)
        ended = wait_for_one([process for _, process in running])
        for command, process in [pair for pair in running if pair[1] in ended]:
            running.remove((command, process))
            if process.returncode:
                end_processes(state["processes"])
                raise StageFailed(f"[{stage.name}] failed with exit code {process.returncode}: {command}")
    missing = [output for output in stage.outputs if not (root / output).exists()]
    if missing:
        raise StageFailed(f"[{stage.name}] ended without writing {', '.join(missing)}")
    seconds = time.monotonic() - started
    _write(mark, identity | {"done": True, "seconds": seconds})
    print(f"[{stage.name}] done in {seconds:.0f} s", flush=True)
    return seconds


def _start(command: str, log: Path | None) -> psutil.Popen:
    if log is None:
        return psutil.Popen(shlex.split(command), env=environment())
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        file.write(f"$ {command}\n".encode())
        file.flush()
        return psutil.Popen(shlex.split(command), env=environment(), stdout=file, stderr=file)


def wait_for_one(processes: list[psutil.Popen], seconds: float = 5.0) -> list[psutil.Popen]:
    """The processes that have ended, after at most `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended = [process for process in processes if process.poll() is not None]
        if ended:
            return ended
        time.sleep(0.05)
    return []


def end_processes(processes: list[tuple[int, float]]) -> None:
    """End processes and what they started; each is named by (pid, time of creation), so that a pid used again
    by another program is left alone."""
    for pid, created in processes:
        try:
            process = psutil.Process(pid)
            if process.create_time() != created:
                continue
            family = [*process.children(recursive=True), process]
        except psutil.NoSuchProcess:
            continue
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=10)


def environment() -> dict[str, str]:
    """The environment of a command: this Python's own commands first, nothing from a hub, and threads that
    sleep while they wait, since two busy-waiting threads on two shared cores slow each other down."""
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write(mark: Path, state: dict) -> None:
    mark.parent.mkdir(parents=True, exist_ok=True)
    temporary = mark.with_suffix(".tmp")
    temporary.write_text(json.dumps(state))
    temporary.replace(mark)
