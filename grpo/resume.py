"""From which checkpoint a run goes on, and whether it may."""

from __future__ import annotations

import json
from pathlib import Path

from grpo.arguments import GrpoConfig
from grpo.checkpoint import checkpoints, latest_checkpoint, step_of
from grpo.records import VALIDATION_METRICS, read_rows
from rollout.manifest import write_json

RUN_CONFIG = "run_config.json"
FREE_TO_CHANGE = {
    "output_dir",
    "resume_from_checkpoint",
    "max_steps",
    "save_steps",
    "save_total_limit",
    "torch_threads",
    "report_to",
    "log_trajectories_steps",
    "eval_steps",
    "eval_on_start",
    "load_best_model_at_end",
    "auxiliary.until_step",
    "judge_options.cache",
    "judge_options.max_concurrency",
    "judge_options.timeout",
    "judge_options.max_retries",
    "alarms",
    "stop_on_alarm",
    "stage_timeout",
    "max_train_inference_gap",
    "vllm_mode",
    "vllm_server_base_url",
    "vllm_server_timeout",
    "vllm_gpu_memory_utilization",
    "vllm_tensor_parallel_size",
    "vllm_enable_sleep_mode",
    "push_to_hub",
    "hub_model_id",
    "hub_private_repo",
    "hub_strategy",
}
"""Settings a resumed run may change; any other would make it another run."""
OF_VALIDATION = {
    "eval_questions",
    "eval_corpus",
    "eval_index",
    "eval_limit",
    "eval_num_samples",
    "eval_temperature",
    "metric_for_best_model",
    "greater_is_better",
}
"""Settings that are free until the first validation: with others its figures could not be compared."""


def find_checkpoint(config: GrpoConfig) -> Path | None:
    """The checkpoint to go on from, or None. ValueError when the folder's run had other settings, when it
    holds checkpoints and the run is not to be resumed, or when it is a file."""
    output_dir = Path(config.output_dir)
    if output_dir.exists() and not output_dir.is_dir():
        raise ValueError(f"output_dir {output_dir} is a file; name a folder, new or of the run to go on with")
    if isinstance(config.resume_from_checkpoint, str):
        named = Path(config.resume_from_checkpoint)
        step_of(named)
        return named
    if not config.resume_from_checkpoint:
        if checkpoints(output_dir):
            raise ValueError(f"{output_dir} holds checkpoints; resume them or choose another output_dir")
        return None
    checkpoint = latest_checkpoint(output_dir)
    if checkpoint and (output_dir / RUN_CONFIG).exists():
        changed = _changed(json.loads((output_dir / RUN_CONFIG).read_text()), config, output_dir)
        if changed:
            raise ValueError(
                f"{output_dir} holds a run with other settings ({', '.join(changed)}); "
                "set them back or choose another output_dir"
            )
    return checkpoint


def _changed(stored: dict, config: GrpoConfig, output_dir: Path) -> list[str]:
    """The settings in which a run differs from the stored one and may not."""
    # A run from before a setting existed ran with what is its default now.
    known = {name: value for name, value in stored.items() if name in GrpoConfig.model_fields}
    before, present = (_flat(GrpoConfig(**known)), _flat(config))
    validated = config.eval_steps is not None and read_rows(output_dir / VALIDATION_METRICS)
    free = FREE_TO_CHANGE if validated else FREE_TO_CHANGE | OF_VALIDATION
    return [name for name in present if name not in free and before.get(name) != present[name]]


def _flat(config: GrpoConfig) -> dict:
    """The settings by name; those of the auxiliary loss and of the judge dotted, because some of them are
    free to change."""
    settings = json.loads(config.model_dump_json())
    for section in ("auxiliary", "judge_options"):
        inner = settings.pop(section) or {"path": None}
        settings |= {f"{section}.{name}": value for name, value in inner.items()}
    return settings


def write_run_config(config: GrpoConfig) -> None:
    """Write the settings beside the run. One without validation keeps the settings of the validations before
    it, so that a later one is held to them."""
    path = Path(config.output_dir) / RUN_CONFIG
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = json.loads(config.model_dump_json())
    if config.eval_steps is None and path.exists():
        stored = json.loads(path.read_text())
        settings |= {name: stored[name] for name in OF_VALIDATION if name in stored}
    write_json(path, settings)
