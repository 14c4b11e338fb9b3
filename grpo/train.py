"""GRPO training: `python -m grpo.train --config configs/grpo/….yaml`, or under `accelerate launch -m`."""

from __future__ import annotations

from collections.abc import Sequence

from grpo.arguments import GrpoConfig
from visor.config import parse_cli

DESCRIPTION = "Train a policy with GRPO in the retrieval environment."


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line and train."""
    train(parse_cli(GrpoConfig, argv, prog="grpo.train", description=DESCRIPTION))


def train(config: GrpoConfig) -> None:
    """Run the training; the final model, loadable on its own, is in `output_dir`."""
    import torch

    from grpo.build import build_trainer

    if config.torch_threads:
        torch.set_num_threads(config.torch_threads)
    build_trainer(config).train()


if __name__ == "__main__":
    main()
