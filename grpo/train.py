"""GRPO training: `python -m grpo.train --config configs/grpo/….yaml`, or under `accelerate launch -m`.

With `--plan` it says what the run would take, and stops."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from grpo.arguments import GrpoConfig
from grpo.planning.options import PlanOptions, TrainCommand
from visor.config import parse_cli

DESCRIPTION = "Train a policy with GRPO in the retrieval environment."


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line and train; the final model, loadable on its own, is in `output_dir`.

    With `--plan`, print what the run would take instead; status 2 when it exceeds a limit.

    Settings that cannot be trained end the command with a sentence and status 2, an alarm of `stop_on_alarm`
    with a checkpoint, a sentence and status 3, a lost engine with a sentence and status 1, and a stage that
    hangs with a report and status 4 (`stage_timeout`).
    """
    command = parse_cli(TrainCommand, argv, prog="grpo.train", description=DESCRIPTION)
    config = command.settings
    if command.plan:
        raise SystemExit(_plan(config, command))
    from grpo.leaving import leave

    leave(_train(config))


def _train(config: GrpoConfig) -> int:
    """Build the run and go through it; returns the exit status."""
    import torch

    from grpo.build import build_trainer
    from grpo.engine_policy import EngineLost
    from grpo.trainer import StoppedByAlarm
    from visor.models.sampling_engine import EngineFailed

    if config.torch_threads:
        torch.set_num_threads(config.torch_threads)
    try:
        trainer = build_trainer(config)
    except (ValueError, OSError, EngineFailed) as error:
        print(f"grpo.train: error: {error}", file=sys.stderr)
        return 2
    try:
        trainer.train()
    except StoppedByAlarm as stopped:
        if trainer.accelerator.is_main_process:
            print(f"grpo.train: {stopped}", file=sys.stderr)
        return 3
    except (EngineLost, EngineFailed) as lost:
        print(f"grpo.train: {lost}; the same command goes on from the newest checkpoint", file=sys.stderr)
        return 1
    return 0


def _plan(config: GrpoConfig, options: PlanOptions) -> int:
    """Print the plan; returns the exit status."""
    from grpo.plan import plan

    try:
        return plan(config, options)
    except (ValueError, OSError) as error:
        print(f"grpo.train: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    main()
