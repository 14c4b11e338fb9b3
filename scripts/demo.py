"""`make demo`: the main job from nothing to a table, on the built-in slide world and two CPU cores.

Every stage is one or more of the project's own commands, printed before it runs, so that each can be copied.
A finished stage leaves a mark; run again after an interruption, the demo goes on after the last mark. A mark
holds only for the same commands, the same configuration files and the same code.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shlex
import shutil
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import psutil

from rollout.fingerprints import code_fingerprint
from scripts.demo_summary import write_summary

ROOT = Path(__file__).parents[1]
DEMO = Path("runs/demo")
SPLITS = ("train", "validation", "test")
WARM_START = Path("data/slide_policy")
"""The policy after the two warm-ups, shipped; `--full` trains it anew."""
EVALUATED = ("base", "sft", "grpo", "grpo_taec")
"""Rows of the table."""
TEMPERATURES = {"sampled": "1.0", "greedy": "0.0"}


@dataclass(frozen=True)
class Stage:
    name: str
    group: str
    """Key under `seconds` of the summary."""
    commands: tuple[str, ...]
    outputs: tuple[str, ...]
    """Files and folders under `runs/demo`, removed before the stage starts anew."""
    parallel: int = 1
    """Commands that run at the same time."""


def stages(full: bool = False) -> list[Stage]:
    """All stages in order. `full`: train the warm start too, from random weights."""
    base = DEMO / "policy" / "base" if full else WARM_START
    policies = {row: DEMO / "policy" / row.removesuffix("_taec") for row in EVALUATED} | {"base": base}
    launch = (
        "accelerate launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no"
    )
    expert = tuple(
        command
        for hop in ("single", "multi")
        for command in (
            f"python -m data.slide_expert --questions questions:{DEMO}/world/train/{hop}_hop.jsonl"
            f" --slides {DEMO}/world/train/slides.jsonl --corpus {DEMO}/corpus/train"
            f" -o {DEMO}/expert/{hop}_hop.jsonl",
            f"python -m sft.filter {DEMO}/expert/{hop}_hop.jsonl"
            f" --questions questions:{DEMO}/world/train/{hop}_hop.jsonl --max_extra_searches 2"
            f" --max_uninformative_searches 10 -o {DEMO}/expert/{hop}_hop_filtered.jsonl",
        )
    )
    return [
        Stage("world", "corpus", (f"python -m data.slide_world -o {DEMO}/world",), ("world",)),
        Stage(
            "ingest",
            "corpus",
            tuple(
                command
                for split in SPLITS
                for command in (
                    f"visor ingest {DEMO}/world/{split}/documents -o {DEMO}/corpus/{split}",
                    f"visor index {DEMO}/corpus/{split} --retriever bm25",
                )
            ),
            ("corpus",),
        ),
        Stage(
            "lessons",
            "sft",
            (
                f"python -m data.slide_lessons look --split {DEMO}/world/train -o {DEMO}/lessons/look.jsonl",
                *expert,
            ),
            ("lessons/look.jsonl", "expert"),
        ),
        *(warm_up_stages(launch) if full else []),
        Stage(
            "sft",
            "sft",
            (f"{launch} sft --config configs/demo/sft.yaml --model_name_or_path {base}",),
            ("policy/sft",),
        ),
        Stage("grpo", "grpo", ("python -m grpo.train --config configs/demo/grpo.yaml",), ("policy/grpo",)),
        Stage(
            "evaluate",
            "evaluate",
            tuple(
                f"python -m rollout.evaluate --config configs/demo/evaluate.yaml"
                f" --checkpoint {policies[row]} --taec {'on' if 'taec' in row else 'off'}"
                f" --temperature {temperature} --output {DEMO}/evaluate/{row}-{decoding}"
                for row in EVALUATED
                for decoding, temperature in TEMPERATURES.items()
            ),
            ("evaluate",),
            parallel=2,
        ),
        Stage(
            "report",
            "report",
            (
                f"visor compare {DEMO}/evaluate/sft-sampled {DEMO}/evaluate/grpo-sampled",
                f"python -m rollout.curves {DEMO}/policy/grpo/metrics.jsonl {DEMO}/curves.png",
                f"visor report {DEMO}/evaluate/grpo-sampled --limit 6 -o {DEMO}/report.html",
            ),
            ("curves.png", "report.html"),
        ),
    ]


def warm_up_stages(launch: str) -> list[Stage]:
    """From random weights to a policy that looks facts up and reads pages."""
    return [
        Stage(
            "random",
            "sft",
            (
                f"python -m data.slide_lessons vocabulary -o {DEMO}/lessons/vocabulary.txt",
                f"python -m visor.models.tiny {DEMO}/lessons/vocabulary.txt -o {DEMO}/policy/random",
                f"python -m data.slide_lessons text -o {DEMO}/lessons/text.jsonl",
                f"python -m data.slide_lessons read --split {DEMO}/world/train -o {DEMO}/lessons/read.jsonl",
            ),
            ("lessons/vocabulary.txt", "policy/random", "lessons/text.jsonl", "lessons/read.jsonl"),
        ),
        *(
            Stage(name, "sft", (f"{launch} sft --config configs/demo/{name}.yaml",), (f"policy/{output}",))
            for name, output in (("warmup_text", "text"), ("warmup_read", "base"))
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.demo", description=__doc__.split("\n")[0])
    parser.add_argument("--full", action="store_true", help="train the warm start too, from random weights")
    parser.add_argument(
        "--until", choices=[stage.name for stage in stages(full=True)], help="last stage to run"
    )
    arguments = parser.parse_args()
    os.chdir(ROOT)
    seconds: dict[str, float] = defaultdict(float)
    digest = code_fingerprint()
    for stage in stages(arguments.full):
        digest = stage_digest(stage, digest)
        seconds[stage.group] += run_stage(stage, digest)
        if stage.name == arguments.until:
            return
    write_summary(DEMO, dict(seconds), list(EVALUATED))


def stage_digest(stage: Stage, before: str) -> str:
    """Identity of a stage's result: its commands, their configuration files, and all that came before."""
    digest = hashlib.sha256(before.encode())
    for command in stage.commands:
        digest.update(command.encode())
        for word in shlex.split(command):
            if word.startswith("configs/"):
                digest.update(Path(word).read_bytes())
    return digest.hexdigest()[:16]


def run_stage(stage: Stage, digest: str) -> float:
    """Run a stage unless its mark is there; returns the seconds that it took, then or now.

    A stage that was interrupted is continued, not started anew: its commands resume by themselves. Commands
    that a killed demo left running are ended first. The seconds of all attempts count.
    """
    mark = DEMO / "stages" / f"{stage.name}.json"
    state = json.loads(mark.read_text()) if mark.exists() else {}
    end_processes(state.get("processes", []))
    if state.get("digest") == digest and state["done"]:
        print(f"[{stage.name}] done before in {state['seconds']:.0f} s", flush=True)
        return state["seconds"]
    if state.get("digest") != digest:
        state = {"digest": digest, "done": False, "seconds": 0.0}
        for output in stage.outputs:
            remove(DEMO / output)
    started = time.monotonic() - state["seconds"]
    waiting, running = list(stage.commands), []
    while waiting or running:
        while waiting and len(running) < stage.parallel:
            command = waiting.pop(0)
            print(f"[{stage.name}] $ {command}", flush=True)
            running.append((command, psutil.Popen(shlex.split(command), env=environment())))
        state["seconds"] = time.monotonic() - started
        state["processes"] = [(process.pid, process.create_time()) for _, process in running]
        _write(mark, state)
        ended = wait_for_one([process for _, process in running])
        for command, process in [pair for pair in running if pair[1] in ended]:
            running.remove((command, process))
            if process.returncode:
                end_processes(state["processes"])
                sys.exit(f"[{stage.name}] failed with exit code {process.returncode}: {command}")
    missing = [output for output in stage.outputs if not (DEMO / output).exists()]
    if missing:
        sys.exit(f"[{stage.name}] ended without writing {', '.join(missing)}")
    seconds = time.monotonic() - started
    _write(mark, {"digest": digest, "done": True, "seconds": seconds})
    print(f"[{stage.name}] done in {seconds:.0f} s", flush=True)
    return seconds


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


if __name__ == "__main__":
    main()
