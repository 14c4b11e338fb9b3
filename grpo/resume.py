"""From which checkpoint a run goes on, and whether it may."""

from __future__ import annotations

import json
from pathlib import Path

from grpo.arguments import GrpoConfig
from grpo.checkpoint import checkpoints, latest_checkpoint, step_of

RUN_CONFIG = "run_config.json"
FREE_TO_CHANGE = {
    "output_dir",
    "resume_from_checkpoint",
    "max_steps",
    "save_steps",
    "save_total_limit",
    "torch_threads",
    "report_to",
}
"""Settings a resumed run may change; any other would make it another run."""


def find_checkpoint(config: GrpoConfig) -> Path | None:
    """The checkpoint to go on from, or None. ValueError when the folder's run had other settings, when it
    holds checkpoints and the run is not to be resumed, or when it is a file."""
    output_dir = Path(config.output_dir)
    if output_dir.exists() and not output_dir.is_dir():
        raise ValueError(f"output_dir {output_dir} is a file; name a folder, new or of the run to go on with")
    if isinstance(config.resume_from_checkpoint, str):
        checkpoint = Path(config.resume_from_checkpoint)
        step_of(checkpoint)
        return checkpoint
    if not config.resume_from_checkpoint:
        if checkpoints(output_dir):
            raise ValueError(f"{output_dir} holds checkpoints; resume them or choose another output_dir")
        return None
    checkpoint = latest_checkpoint(output_dir)
    if checkpoint and (output_dir / RUN_CONFIG).exists():
        stored = json.loads((output_dir / RUN_CONFIG).read_text())
        present = json.loads(config.model_dump_json())
        # A run from before a setting existed ran with what is its default now.
        defaults = {name: field.default for name, field in GrpoConfig.model_fields.items()}
        before = defaults | stored
        changed = [k for k in present if k not in FREE_TO_CHANGE and before[k] != present[k]]
        if changed:
            raise ValueError(
                f"{output_dir} holds a run with other settings ({', '.join(changed)}); "
                "set them back or choose another output_dir"
            )
    return checkpoint


def write_run_config(config: GrpoConfig) -> None:
    """Write the settings beside the run."""
    output_dir = Path(config.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / RUN_CONFIG).write_text(config.model_dump_json(indent=2) + "\n")
