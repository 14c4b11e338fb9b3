"""The files a run writes as it goes: a line a step in metrics.jsonl, a line a validation in validation.jsonl,
and their trajectories in `rollouts/` and `validation/`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from rollout.recorder import read_lines, rewrite

METRICS = "metrics.jsonl"
ROLLOUTS = "rollouts"
VALIDATION_METRICS = "validation.jsonl"
VALIDATIONS = "validation"
HIGHLIGHTS = "highlights"


def append_line(path: Path, line: dict) -> None:
    """Add one line and wait until it is on the disk."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_rows(path: Path) -> list[dict]:
    """The lines of a file without a torn last one; none when there is no file."""
    return list(read_lines(path)) if path.exists() else []


def write_trajectories(folder: Path, step: int, records: Iterable[dict]) -> None:
    """Write `step-N.jsonl` as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    rewrite(folder / f"step-{step}.jsonl", records)


def forget_after(output_dir: Path, step: int) -> None:
    """Drop what a killed run wrote of the steps after `step`."""
    output_dir.mkdir(parents=True, exist_ok=True)
    for name, folder in ((METRICS, ROLLOUTS), (VALIDATION_METRICS, VALIDATIONS)):
        path = output_dir / name
        if path.exists():
            rewrite(path, [line for line in read_rows(path) if line["step"] <= step])
        _drop_after(output_dir / folder, step)
    _drop_after(output_dir / HIGHLIGHTS, step)


def _drop_after(folder: Path, step: int) -> None:
    for file in folder.glob("step-*"):
        if int(file.name.removeprefix("step-").partition(".")[0]) > step:
            file.unlink()
