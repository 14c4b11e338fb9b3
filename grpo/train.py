"""GRPO training: `python -m grpo.train --config configs/grpo/….yaml`, or under `accelerate launch -m`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from grpo.arguments import GrpoConfig
from visor.config import parse_cli

DESCRIPTION = "Train a policy with GRPO in the retrieval environment."


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line and train; the final model, loadable on its own, is in `output_dir`.

    Settings that cannot be trained end the command with a sentence and status 2, an alarm of `stop_on_alarm`
    with a checkpoint, a sentence and status 3.
    """
    config = parse_cli(GrpoConfig, argv, prog="grpo.train", description=DESCRIPTION)
    import torch

    from grpo.build import build_trainer
    from grpo.trainer import StoppedByAlarm

    if config.torch_threads:
        torch.set_num_threads(config.torch_threads)
    try:
        trainer = build_trainer(config)
    except (ValueError, OSError) as error:
        print(f"grpo.train: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    try:
        trainer.train()
    except StoppedByAlarm as stopped:
        if trainer.accelerator.is_main_process:
            print(f"grpo.train: {stopped}", file=sys.stderr)
        raise SystemExit(3) from None


if __name__ == "__main__":
    main()
