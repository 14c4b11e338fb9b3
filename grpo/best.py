"""The best model by validation: `best/`, whole at every moment, and never from steps that were forgotten."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from grpo.checkpoint import write_folder
from rollout.manifest import write_json
from visor.files import sync_folder

BEST_FOLDER = "best"
BEST_RECORD = "best.json"
"""In that folder: {step, metric, value}."""
_PREVIOUS = ".best-previous"
_NEW = ".tmp-best"
_OLD = ".tmp-best-old"


class BestModel:
    """Keeps the model with the best value of one metric.

    A new best may be of a step that no checkpoint covers yet; a killed run then goes on from before it. The
    best it replaces is kept aside until a checkpoint covers the new one, so that `recall` can bring it back.
    """

    def __init__(self, output_dir: Path, metric: str, greater_is_better: bool) -> None:
        self.output_dir = output_dir
        self.metric = metric
        self.greater_is_better = greater_is_better

    @property
    def folder(self) -> Path:
        return self.output_dir / BEST_FOLDER

    def offer(self, step: int, value: float | None, write: Callable[[Path], None], covered_step: int) -> bool:
        """Take the model of `step` when its value is better than that of the best; True when it was taken.

        `write` fills a folder with the model. `covered_step`: the step a killed run would go on from. A value
        of None (nothing to measure) is never taken; of equal values the earlier stays.
        """
        best = read_best(self.folder)
        rival = best if best and best["metric"] == self.metric else None
        if value is None or (rival and not self._better(value, rival["value"])):
            return False

        def write_with_record(folder: Path) -> None:
            write(folder)
            write_json(folder / BEST_RECORD, {"step": step, "metric": self.metric, "value": value})

        write_folder(self.output_dir / _NEW, write_with_record)
        if best:
            survives = best["step"] <= covered_step < step
            _move(self.folder, self.output_dir / (_PREVIOUS if survives else _OLD))
        os.rename(self.output_dir / _NEW, self.folder)
        sync_folder(self.output_dir)
        shutil.rmtree(self.output_dir / _OLD, ignore_errors=True)
        self.settle(covered_step)
        return True

    def settle(self, covered_step: int) -> None:
        """Drop the best kept aside once a checkpoint covers the present one."""
        best = read_best(self.folder)
        if best and best["step"] <= covered_step:
            shutil.rmtree(self.output_dir / _PREVIOUS, ignore_errors=True)

    def copy_model(self, target: Path) -> bool:
        """Copy the best model into a folder; False when there is none."""
        if not self.folder.exists():
            return False
        ignored = shutil.ignore_patterns(BEST_RECORD)
        shutil.copytree(self.folder, target, ignore=ignored, dirs_exist_ok=True)
        return True

    def _better(self, value: float, than: float) -> bool:
        return value > than if self.greater_is_better else value < than


def recall(output_dir: Path, step: int) -> None:
    """Put `best/` into the state of a run that goes on from `step`: one of a later step is dropped, and the
    one it had replaced comes back."""
    for name in (_NEW, _OLD):
        shutil.rmtree(output_dir / name, ignore_errors=True)
    folder, previous = output_dir / BEST_FOLDER, output_dir / _PREVIOUS
    best, earlier = read_best(folder), read_best(previous)
    if best and best["step"] > step:
        shutil.rmtree(folder)
    if earlier and earlier["step"] <= step and not folder.exists():
        os.rename(previous, folder)
        sync_folder(output_dir)
    shutil.rmtree(previous, ignore_errors=True)


def read_best(folder: Path) -> dict | None:
    """The record of a best model's folder, or None when there is none."""
    path = folder / BEST_RECORD
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _move(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    os.rename(source, target)
