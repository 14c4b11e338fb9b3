"""What a run writes to go on from and to hand over: checkpoints and model folders."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import gather_object

from grpo.arguments import GrpoConfig
from grpo.card import card_facts
from grpo.checkpoint import drop_old, save_atomically
from grpo.hyperparameters import hyperparameters, set_hyperparameters
from grpo.launching import sharding_of
from grpo.random_state import random_state, restore_random_state
from grpo.sharding import WholePolicy
from grpo.shards import check_fits_launch, make_shards
from rollout.manifest import write_json
from rollout.model_card import write_card
from visor.models.lora import save_policy


class RunSaver:
    """Writes the model, the optimizer, the schedule and the random state of a run, and takes them back.

    Every method is called on all processes; the main one writes what is whole, each its own share of what is
    split.
    """

    def __init__(
        self,
        config: GrpoConfig,
        accelerator,
        *,
        model,
        optimizer,
        scheduler,
        processor,
        policy: WholePolicy,
    ) -> None:
        """`model` as prepared for training, `policy` the whole of it."""
        self.config = config
        self.accelerator = accelerator
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.processor = processor
        self.policy = policy
        self.output_dir = Path(config.output_dir)
        self.shards = make_shards(accelerator, model, optimizer)

    def save(self, step: int, questions_drawn: int) -> None:
        """Write `checkpoint-<step>`: a loadable model folder and what is needed to go on from it."""
        self.accelerator.wait_for_everyone()
        states = gather_object([random_state()])
        shards = self.output_dir / f".tmp-shards-{step}"
        if self.shards is not None:
            if self.accelerator.is_main_process:
                shutil.rmtree(shards, ignore_errors=True)
            self.accelerator.wait_for_everyone()
            self.shards.save(shards)
            self.accelerator.wait_for_everyone()

        def write(folder: Path) -> None:
            self.write_checkpoint(folder, step, questions_drawn, states)
            if self.shards is not None:
                os.rename(shards, folder / self.shards.folder)

        with self.policy.present():
            if self.accelerator.is_main_process:
                save_atomically(self.output_dir, step, write)
                drop_old(self.output_dir, self.config.save_total_limit)
            self.accelerator.wait_for_everyone()

    @contextmanager
    def model_writer(self) -> Iterator[Callable[[Path], None]]:
        """Inside, what it gives writes the present model into a folder that plain `from_pretrained` loads;
        the main process is to use it."""
        with self.policy.present():
            yield self.write_model
            self.accelerator.wait_for_everyone()

    def write_checkpoint(self, folder: Path, step: int, questions_drawn: int, states: list[dict]) -> None:
        """Fill a checkpoint's folder with everything but the processes' shares. `states`: the random state of
        each process."""
        self.write_model(folder)
        write_card(folder, card_facts(self.config, step))
        if self.shards is None:
            torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
        torch.save(self.scheduler.state_dict(), folder / "scheduler.pt")
        torch.save(states, folder / "rng_state.pt")
        state = {
            "schema_version": 1,
            "step": step,
            "questions_drawn": questions_drawn,
            "num_processes": self.accelerator.num_processes,
            "sharding": sharding_of(self.accelerator),
        }
        write_json(folder / "trainer_state.json", state)

    def write_model(self, folder: Path) -> None:
        """Write a folder that plain `from_pretrained` loads, while the whole policy is present."""
        save_policy(self.policy.model, folder)
        self.processor.save_pretrained(folder)

    def load(self, checkpoint: Path) -> dict:
        """Take optimizer, schedule and random state from a checkpoint, weights being loaded before; returns
        its `trainer_state.json`. Rates and the like stay those of the settings, which may be others than the
        checkpoint's. ValueError for a checkpoint of processes that shared the state in another way."""
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        check_fits_launch(state, checkpoint, self.accelerator)
        configured = hyperparameters(self.scheduler)
        load = partial(torch.load, map_location="cpu", weights_only=True)
        if self.shards is not None:
            self.shards.load(checkpoint / self.shards.folder)
        else:
            self.optimizer.load_state_dict(load(checkpoint / "optimizer.pt"))
        self.scheduler.load_state_dict(load(checkpoint / "scheduler.pt"))
        set_hyperparameters(self.scheduler, configured)
        states = load(checkpoint / "rng_state.pt")
        # A checkpoint of fewer processes, or from before each had a state of its own, lends the first one's.
        states = [states] if isinstance(states, dict) else states
        place = self.accelerator.process_index
        restore_random_state(states[place if place < len(states) else 0])
        return state
