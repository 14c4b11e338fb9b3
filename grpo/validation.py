"""Validation while training: the same questions under the same random numbers, every `eval_steps` steps."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from accelerate.utils import gather_object

from grpo.step_metrics import reward_metrics
from rollout.engine import EpisodeJob, RolloutEngine
from rollout.recorder import read_lines, rewrite
from rollout.results import result_row
from visor.models.transformers import TransformersClient
from visor.types import Question, Trajectory, derive_seed

LINES = "validation.jsonl"
FOLDER = "validation"


class Validation:
    """Answers the validation questions with the policy in training.

    It draws from no random state of the run and shares no image features with its rollouts, so training is
    the same with and without it. Episode seeds follow from (run seed, question id, sample, turn): two
    validations differ by the policy alone.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        client: TransformersClient,
        questions: Sequence[Question],
        *,
        accelerator,
        output_dir: Path,
        seed: int,
        num_samples: int = 1,
    ) -> None:
        self.engine = engine
        self.client = client
        self.questions = questions
        self.accelerator = accelerator
        self.output_dir = output_dir
        self.seed = derive_seed(seed, "validation")
        self.num_samples = num_samples

    def run(self, step: int) -> dict:
        """Answer every question and write `validation/step-N.jsonl`; returns the line for validation.jsonl,
        the same on every process."""
        started = time.perf_counter()
        done = self._answer(step)
        if self.accelerator.is_main_process:
            folder = self.output_dir / FOLDER
            folder.mkdir(parents=True, exist_ok=True)
            rewrite(folder / f"step-{step}.jsonl", (record for _, record, _ in done))
        figures = reward_metrics([row for _, _, row in done])
        seconds = round(time.perf_counter() - started, 4)
        return {"step": step, **figures, "n": len(done), "seconds": seconds}

    def _answer(self, step: int) -> list[tuple]:
        """(position, trajectory as JSON, result row) of all processes, in question order."""
        self.client.policy_version = step
        jobs = [
            (position * self.num_samples + sample, EpisodeJob(question, self.seed, sample))
            for position, question in enumerate(self.questions)
            if position % self.accelerator.num_processes == self.accelerator.process_index
            for sample in range(self.num_samples)
        ]
        # Features of an earlier validation were computed in other batches, or by other weights of the tower.
        self.client.clear_cache()
        trajectories = self.engine.run([job for _, job in jobs])
        self.client.clear_cache()
        mine = [
            (place, _record(trajectory), result_row(trajectory, job.question))
            for (place, job), trajectory in zip(jobs, trajectories, strict=True)
        ]
        return sorted(gather_object(mine), key=lambda item: item[0])

    def append(self, line: dict) -> None:
        """Add an evaluation to validation.jsonl; until then it counts as not done."""
        with open(self.output_dir / LINES, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def line_of(self, step: int) -> dict | None:
        """The line of the evaluation at a step, or None."""
        path = self.output_dir / LINES
        lines = read_lines(path) if path.exists() else ()
        return next((line for line in lines if line["step"] == step), None)


def forget_after(output_dir: Path, step: int) -> None:
    """Drop the evaluations of steps after `step`."""
    path = output_dir / LINES
    if path.exists():
        rewrite(path, [line for line in list(read_lines(path)) if line["step"] <= step])
    for file in (output_dir / FOLDER).glob("step-*.jsonl"):
        if int(file.stem.removeprefix("step-")) > step:
            file.unlink()


def _record(trajectory: Trajectory) -> dict:
    """Without the prompt's token ids, which follow from its messages."""
    return trajectory.model_dump(
        mode="json", exclude={"turns": {"__all__": {"completion": {"prompt_token_ids"}}}}
    )
