"""W&B and TensorBoard, through Accelerate's trackers; both work offline."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, is_tensorboard_available, is_wandb_available

from rollout.manifest import write_json

PROJECT = "grpo"
TENSORBOARD_FOLDER = "tensorboard"
RUN_IDS = "trackers.json"
"""The run's id at W&B, kept so that a resumed run goes on in it."""


def check_installed(report_to: Sequence[str]) -> None:
    """ValueError, saying what to install, for a tracker whose package is missing."""
    available = {"wandb": is_wandb_available, "tensorboard": is_tensorboard_available}
    for name in report_to:
        if not available[name]():
            raise ValueError(
                f"report_to {name} needs the package {name}, which is not installed: "
                f"pip install 'visor-rag[{name}]', or pip install {name}, or leave {name} out of report_to"
            )


def accelerator_arguments(report_to: Sequence[str], output_dir: Path) -> dict[str, Any]:
    """What an Accelerator is to be made with."""
    if not report_to:
        return {}
    folders = ProjectConfiguration(
        project_dir=str(output_dir), logging_dir=str(output_dir / TENSORBOARD_FOLDER)
    )
    return {"log_with": list(report_to), "project_config": folders}


def start_trackers(
    accelerator: Accelerator,
    report_to: Sequence[str],
    settings: Mapping[str, Any],
    output_dir: Path,
    step: int,
) -> None:
    """Begin, or go on after `step` of a run that is resumed: TensorBoard then drops what it has of later
    steps, W&B keeps to the same run."""
    if not report_to:
        return
    init_kwargs: dict[str, dict[str, Any]] = {"tensorboard": {"purge_step": step + 1 if step else None}}
    if "wandb" in report_to and accelerator.is_main_process:
        run = {"id": _run_id(output_dir, new=not step), "resume": "allow", "name": output_dir.name}
        init_kwargs["wandb"] = {"dir": str(output_dir), **run}
    config = {name: _plain(value) for name, value in flat(settings).items()}
    project = os.environ.get("WANDB_PROJECT", PROJECT)
    accelerator.init_trackers(project, config=config, init_kwargs=init_kwargs)


def numbers(figures: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among the figures of a step, those of nested ones under `outer/inner`."""
    return {
        name: value
        for name, value in flat(figures).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def fenced(text: str) -> str:
    """A text whose lines a tracker that reads Markdown keeps apart."""
    return "\n".join("    " + line for line in text.splitlines())


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, names joined by a slash."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}/")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _plain(value: Any) -> bool | int | float | str:
    """A setting as what every tracker stores."""
    return value if isinstance(value, bool | int | float | str) else json.dumps(value)


def _run_id(output_dir: Path, new: bool) -> str:
    """The id of the run in this folder; a new one for a run that begins."""
    path = output_dir / RUN_IDS
    if not new and path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))["wandb"]
    run_id = secrets.token_hex(4)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"wandb": run_id})
    return run_id
