"""The GRPO loop: sample groups, score, advantages, update, log, save.

A loop on Accelerate rather than a subclass of a Trainer: the number of rows varies from step to step, images
appear in the middle of a row, and a step's order of work is the subject itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

from accelerate.utils import broadcast_object_list, gather_object

from grpo.alarms import Alarm
from grpo.arguments import GrpoConfig
from grpo.batch import BuildRows, rewards_to_scale_by, rows_of_groups
from grpo.behaviour import behaviour_metrics
from grpo.best import BestModel, recall
from grpo.card import card_facts
from grpo.checkpoint import clear_leftovers, drop_after, drop_old
from grpo.engine_policy import EnginePolicy
from grpo.journal import Journal
from grpo.records import forget_after
from grpo.sampling import GroupSampler, StepGroups
from grpo.saving import RunSaver
from grpo.schedule import step_items
from grpo.sharding import WholePolicy
from grpo.step_metrics import (
    judge_metrics,
    reward_metrics,
    row_metrics,
    sampling_metrics,
    step_seconds,
    update_metrics,
    validation_summary,
)
from grpo.stopwatch import Stopwatch
from grpo.update import PolicyUpdate
from grpo.validation import Validation
from grpo.watch import run_watchdog
from rollout.engine import RolloutEngine
from rollout.model_card import write_card
from rollout.model_hub import ModelHub
from rollout.rows import TrainingRow
from visor.models.features import ImageFeatures
from visor.models.transformers import TransformersClient
from visor.models.vllm import VLLMClient
from visor.stage_clock import CLOCK
from visor.types import Question, derive_seed


class StoppedByAlarm(Exception):
    """An alarm ended the run; the message says which, and how to go on."""


class GrpoTrainer:
    """Everything a run needs, already built; `train()` runs it from `start_step` to `max_steps`."""

    def __init__(
        self,
        config: GrpoConfig,
        *,
        accelerator,
        model,
        optimizer,
        scheduler,
        update: PolicyUpdate,
        engine: RolloutEngine,
        client: TransformersClient | VLLMClient,
        questions: Sequence[Question],
        build_rows: BuildRows,
        processor,
        features: ImageFeatures,
        policy: WholePolicy,
        auxiliary_rows: Sequence[TrainingRow] = (),
        validation: Validation | None = None,
        engine_policy: EnginePolicy | None = None,
        hub: ModelHub | None = None,
        start_step: int = 0,
    ) -> None:
        self.config = config
        self.accelerator = accelerator
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.update = update
        self.engine = engine
        self.client = client
        self.questions = questions
        self.build_rows = build_rows
        self.features = features
        self.policy = policy
        self.auxiliary_rows = auxiliary_rows
        self.step_done = start_step
        self.validation = validation
        self.engine_policy = engine_policy
        """Keeps the engine that rollouts sample from at the policy; None: they sample from the policy."""
        self.hub = hub
        self.output_dir = Path(config.output_dir)
        self.saver = RunSaver(
            config,
            accelerator,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            processor=processor,
            policy=policy,
        )
        self.journal = Journal(config, accelerator)
        self.best = BestModel(self.output_dir, config.metric_for_best_model, config.best_is_greater)
        self.saved_step = start_step
        """The step a killed run would go on from."""
        self.questions_drawn = start_step * config.questions_per_step
        """How far the data order has been walked."""
        self.sampler = GroupSampler(
            engine,
            questions,
            questions_per_step=config.questions_per_step,
            num_generations=config.num_generations,
            seed=config.seed,
            filter_zero_std_groups=config.filter_zero_std_groups,
            max_resampling_rounds=config.max_resampling_rounds,
            process_index=accelerator.process_index,
            num_processes=accelerator.num_processes,
        )

    def train(self) -> None:
        """Run the remaining steps, then write the final model into `output_dir`.

        StoppedByAlarm, after a checkpoint, when an alarm of `stop_on_alarm` is raised. A stage that hangs
        ends the process (`stage_timeout`).
        """
        with run_watchdog(self.config, self.accelerator.process_index, self.accelerator.num_processes):
            try:
                self._train()
            finally:
                if self.engine_policy:
                    self.engine_policy.close()

    def _train(self) -> None:
        self._go_on()
        for step in range(self.step_done + 1, self.config.max_steps + 1):
            metrics = self.train_step(step)
            self.step_done = step
            raised = self.journal.watch(metrics)
            self.journal.log(metrics)
            with CLOCK.running("gather"):
                stop = self._sound(raised)
            if step % self.config.save_steps == 0 or step == self.config.max_steps or stop:
                self.save()
            if self._validates_at(step):
                self._validate(step)
            if stop:
                self._end()
                raise StoppedByAlarm(self._stop_message(stop))
        with CLOCK.running("save", "the final model"):
            with self.saver.model_writer() as write:
                if self.accelerator.is_main_process:
                    self._write_final_model(write)
            if self.accelerator.is_main_process and self.hub:
                self.hub.finish()
            self.accelerator.wait_for_everyone()
        self._end()

    def _end(self) -> None:
        """A colocated engine shares the process group, so it ends before the processes part."""
        if self.engine_policy:
            self.engine_policy.close()
        self.accelerator.end_training()

    def _go_on(self) -> None:
        """Forget what came after the checkpoint, and make up for a validation that was not reached."""
        step, line = self.step_done, None
        if self.accelerator.is_main_process:
            forget_after(self.output_dir, step)
            clear_leftovers(self.output_dir)
            drop_after(self.output_dir, step)
            drop_old(self.output_dir, self.config.save_total_limit)
            recall(self.output_dir, step)
            self.journal.read_back()
        if self.validation is None or not self._validates_at(step):
            return
        if self.accelerator.is_main_process:
            line = self.validation.line_of(step)
        with CLOCK.running("gather"):
            line, kept = broadcast_object_list([line, self.best.folder.exists()])
        if line is None:
            self._validate(step)
        elif not kept:  # back to an earlier step than that of the best
            self._offer(step, line)

    def train_step(self, step: int) -> dict:
        """One step; returns its line of metrics."""
        CLOCK.take()  # what a validation took is not the step's
        watch = Stopwatch()
        sampled = self._sample(step)
        groups = sampled.groups
        watch.lap("rollout")
        config = self.config
        with CLOCK.running("gather"):
            batch_rewards = gather_object(rewards_to_scale_by(groups, config.filter_zero_std_groups))
        rows = rows_of_groups(
            groups,
            self.build_rows,
            max_length=config.max_length,
            scale_rewards=config.scale_rewards,
            batch_rewards=batch_rewards,
            mask_truncated_completions=config.mask_truncated_completions,
            filter_zero_std_groups=config.filter_zero_std_groups,
        )
        watch.lap("rows")
        with CLOCK.running("gather"):
            results = self.journal.record(step, groups)
            self.journal.record_highlights(step, groups)
        watch.lap("record")
        if self.engine_policy:
            self.engine_policy.rest()
        rate = self.scheduler.get_last_lr()[0]
        seed = derive_seed(self.config.seed, "updates", step)
        with CLOCK.running("update"):
            report = self.update.run(rows.rows, self._auxiliary(step), seed)
        with warnings.catch_warnings():
            # A step without a gradient leaves the optimizer alone and still counts in the schedule.
            warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler\.step\(\)` before")
            self.scheduler.step()
        watch.lap("update")
        gap = self.engine_policy.refresh(step) if self.engine_policy else {}
        watch.lap("push")
        return {
            "step": step,
            **reward_metrics(results),
            **behaviour_metrics(groups),
            **update_metrics(report, self.update.reference is not None),
            **gap,
            **row_metrics(rows),
            **sampling_metrics(sampled),
            **judge_metrics(self.engine.judge),
            "learning_rate": rate,
            "seconds": step_seconds(watch.seconds, CLOCK.take()),
        }

    def _sample(self, step: int) -> StepGroups:
        """The groups of this process's share of the step's questions."""
        self.client.policy_version = step - 1
        with CLOCK.running("rollout", f"step {step}"), self._policy_present():
            sampled = self.sampler.sample(step, first=self.questions_drawn)
        if self.engine_policy:
            self.engine_policy.check_alive(sampled.groups)
        self.questions_drawn += sampled.drawn
        return sampled

    def _policy_present(self) -> AbstractContextManager:
        """The whole policy on each process where it samples itself; an engine has weights of its own."""
        return nullcontext() if self.engine_policy else self.policy.present()

    def _auxiliary(self, step: int) -> list[TrainingRow]:
        """The step's auxiliary rows, this process's share of them."""
        settings, accelerator = self.config.auxiliary, self.accelerator
        if settings is None or not self.auxiliary_rows:
            return []
        if settings.until_step is not None and step > settings.until_step:
            return []
        seed = derive_seed(self.config.seed, "auxiliary")
        rows = step_items(self.auxiliary_rows, step, settings.rows_per_step, seed)
        return rows[accelerator.process_index :: accelerator.num_processes]

    # ------------------------------------------------------------ alarms

    def _sound(self, raised: Sequence[Alarm]) -> list[str]:
        """Print them; returns, on every process, the names of those that end the run."""
        for alarm in raised:
            print(alarm.message, flush=True)
        stopping = [alarm.name for alarm in raised if alarm.name in self.config.stop_on_alarm]
        return broadcast_object_list([stopping])[0]

    def _stop_message(self, names: Sequence[str]) -> str:
        checkpoint = self.output_dir / f"checkpoint-{self.step_done}"
        return (
            f"stopped after step {self.step_done} by {', '.join(names)}; {checkpoint} is saved. "
            f"Without resume_from_checkpoint the same command goes on from there; with "
            f"--resume_from_checkpoint {checkpoint} other settings may be given"
        )

    # ------------------------------------------------------------ validation

    def _validates_at(self, step: int) -> bool:
        if self.validation is None or self.config.eval_steps is None:
            return False
        if step == 0:
            return self.config.eval_on_start
        return step % self.config.eval_steps == 0 or step == self.config.max_steps

    def _validate(self, step: int) -> None:
        """Evaluate the present policy, keep it when it is the best, and log it. The line is written last: a
        run killed before it validates again."""
        assert self.validation is not None
        with CLOCK.running("validation", f"step {step}"), self._policy_present():
            line = self.validation.run(step)
        is_best = self._offer(step, line)
        if self.accelerator.is_main_process:
            self.validation.append(line)
            self.journal.report(
                {f"eval/{name}": value for name, value in line.items() if name != "step"}, step
            )
            print(validation_summary(line, self.config.metric_for_best_model, is_best), flush=True)
        self.accelerator.wait_for_everyone()

    def _offer(self, step: int, line: dict) -> bool:
        """Keep the present policy where it is the best; True, on the main process, when it is."""
        with self.saver.model_writer() as write:
            if not self.accelerator.is_main_process:
                return False
            value = line[self.config.metric_for_best_model]
            write_model = partial(self._write_with_card, write, validation=line)
            return self.best.offer(step, value, write_model, self.saved_step)

    # ------------------------------------------------------------ checkpoints

    def save(self) -> None:
        """Write `checkpoint-<step>`: a loadable model folder and what is needed to go on from it."""
        # A run that goes on from here has no image features, and their last bits depend on what is computed
        # together.
        self.features.clear()
        with CLOCK.running("save", f"checkpoint-{self.step_done}"):
            self.saver.save(self.step_done, self.questions_drawn)
            if self.accelerator.is_main_process:
                self.best.settle(self.step_done)
                if self.hub:
                    self.hub.saved(self.output_dir / f"checkpoint-{self.step_done}", self.step_done)
            self.saved_step = self.step_done
            self.accelerator.wait_for_everyone()

    def _write_with_card(
        self, write: Callable[[Path], None], folder: Path, validation: dict | None = None
    ) -> None:
        """The present model with its card. `validation`: its line, where it is not recorded yet."""
        write(folder)
        write_card(folder, card_facts(self.config, self.step_done, validation))

    def _write_final_model(self, write: Callable[[Path], None]) -> None:
        """The last step's model into `output_dir`, or the best one's where it is asked for."""
        if self.config.load_best_model_at_end:
            if self.best.copy_model(self.output_dir):
                return
            metric = self.config.metric_for_best_model
            print(f"no validation had a {metric}: the final model is the last one", flush=True)
        self._write_with_card(write, self.output_dir)

    def load_state(self, checkpoint: Path) -> None:
        """Go on from a checkpoint whose weights are loaded already; see `RunSaver.load`."""
        state = self.saver.load(checkpoint)
        self.step_done = state["step"]
        # Checkpoints from before resampling existed have no count: each of their steps drew as many.
        self.questions_drawn = state.get("questions_drawn", self.step_done * self.config.questions_per_step)
        self.saved_step = self.step_done
