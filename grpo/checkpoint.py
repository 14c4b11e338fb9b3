"""Checkpoints that are either whole or absent: written beside, synced, renamed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from visor.files import sync_folder

_NAME = re.compile(r"checkpoint-(\d+)")
_LEFTOVERS = (".tmp-checkpoint-*", ".tmp-shards-*", ".old-checkpoint-*")


def save_atomically(output_dir: Path, step: int, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a temporary folder, then rename it to `checkpoint-<step>`; returns that path.

    A kill at any moment leaves the earlier checkpoints and at most a folder that `latest_checkpoint` ignores.
    """
    final = output_dir / f"checkpoint-{step}"
    temporary = output_dir / f".tmp-checkpoint-{step}"
    write_folder(temporary, write)
    if final.exists():
        remove(final)
    os.rename(temporary, final)
    sync_folder(output_dir)
    return final


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new folder, in the place of an old one, and flush all of it to disk."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write(folder)
    for path in [*folder.rglob("*"), folder]:
        sync_folder(path)


def checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """(step, path) of the checkpoints in a folder, oldest first."""
    found = []
    for path in output_dir.iterdir() if output_dir.exists() else []:
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match[1]), path))
    return sorted(found)


def latest_checkpoint(output_dir: Path) -> Path | None:
    """The checkpoint of the highest step, or None."""
    found = checkpoints(output_dir)
    return found[-1][1] if found else None


def drop_after(output_dir: Path, step: int) -> None:
    """Delete the checkpoints of later steps than `step`: a run that goes on from there makes its own."""
    for later, path in checkpoints(output_dir):
        if later > step:
            remove(path)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written; ValueError when the folder is not one."""
    match = _NAME.fullmatch(checkpoint.name)
    if not (match and checkpoint.is_dir()):
        raise ValueError(f"{checkpoint} is not a checkpoint folder; expected one named checkpoint-<step>")
    return int(match[1])


def drop_old(output_dir: Path, keep: int | None) -> None:
    """Delete all but the newest `keep` checkpoints; None keeps all."""
    for _, path in checkpoints(output_dir)[: -keep if keep else 0]:
        remove(path)


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a kill leaves no half of one under its name."""
    hidden = checkpoint.with_name(f".old-{checkpoint.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(checkpoint, hidden)
    shutil.rmtree(hidden)


def clear_leftovers(output_dir: Path) -> None:
    """Delete what a killed run left of checkpoints that it was writing or deleting."""
    for pattern in _LEFTOVERS:
        for path in output_dir.glob(pattern):
            shutil.rmtree(path)
