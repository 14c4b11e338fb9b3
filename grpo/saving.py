"""What a run writes to go on from and to hand over: checkpoints and model folders."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import DistributedType

from grpo.arguments import GrpoConfig
from grpo.card import card_facts
from grpo.checkpoint import drop_old, save_atomically
from grpo.hyperparameters import hyperparameters, set_hyperparameters
from grpo.random_state import random_state, restore_random_state
from rollout.manifest import write_json
from rollout.model_card import write_card
from visor.models.lora import save_policy

DEEPSPEED_FOLDER = "deepspeed"
"""Its own sharded optimizer state and master weights, below a checkpoint."""


class RunSaver:
    """Writes the model, the optimizer, the schedule and the random state of a run, and takes them back."""

    def __init__(
        self,
        config: GrpoConfig,
        accelerator,
        *,
        model,
        optimizer,
        scheduler,
        processor,
    ) -> None:
        self.config = config
        self.accelerator = accelerator
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.processor = processor
        self.output_dir = Path(config.output_dir)

    def save(self, step: int, questions_drawn: int) -> None:
        """Write `checkpoint-<step>`: a loadable model folder and what is needed to go on from it. Called on
        every process."""
        self.accelerator.wait_for_everyone()
        shards = self.output_dir / f".tmp-shards-{step}"
        if self._is_deepspeed:
            # Every process writes its share of the optimizer state, so this cannot be left to the first one.
            self.model.save_checkpoint(str(shards), tag=DEEPSPEED_FOLDER)
            self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:

            def write(folder: Path) -> None:
                self.write_checkpoint(folder, step, questions_drawn)
                if self._is_deepspeed:
                    os.rename(shards, folder / DEEPSPEED_FOLDER)

            save_atomically(self.output_dir, step, write)
            drop_old(self.output_dir, self.config.save_total_limit)

    def write_checkpoint(self, folder: Path, step: int, questions_drawn: int) -> None:
        """Fill a checkpoint's folder with everything but DeepSpeed's shards."""
        self.write_model(folder)
        write_card(folder, card_facts(self.config, step))
        if not self._is_deepspeed:
            torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
        torch.save(self.scheduler.state_dict(), folder / "scheduler.pt")
        torch.save(random_state(), folder / "rng_state.pt")
        state = {"schema_version": 1, "step": step, "questions_drawn": questions_drawn}
        write_json(folder / "trainer_state.json", state)

    def write_model(self, folder: Path) -> None:
        """Write a folder that plain `from_pretrained` loads."""
        save_policy(self.accelerator.unwrap_model(self.model), folder)
        self.processor.save_pretrained(folder)

    def load(self, checkpoint: Path) -> dict:
        """Take optimizer, schedule and random state from a checkpoint, weights being loaded before; returns
        its `trainer_state.json`. Rates and the like stay those of the settings, which may be others than the
        checkpoint's."""
        configured = hyperparameters(self.scheduler)
        load = partial(torch.load, map_location="cpu", weights_only=True)
        if self._is_deepspeed:
            self.model.load_checkpoint(str(checkpoint / DEEPSPEED_FOLDER), tag=DEEPSPEED_FOLDER)
        else:
            self.optimizer.load_state_dict(load(checkpoint / "optimizer.pt"))
        self.scheduler.load_state_dict(load(checkpoint / "scheduler.pt"))
        set_hyperparameters(self.scheduler, configured)
        restore_random_state(load(checkpoint / "rng_state.pt"))
        return json.loads((checkpoint / "trainer_state.json").read_text())

    @property
    def _is_deepspeed(self) -> bool:
        return self.accelerator.distributed_type == DistributedType.DEEPSPEED
