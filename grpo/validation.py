"""Validation while training: the same questions under the same random numbers, every `eval_steps` steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from accelerate.utils import gather_object

from grpo.figures import pass_figures
from grpo.records import VALIDATION_METRICS, VALIDATIONS, append_line, read_rows, write_trajectories
from grpo.step_metrics import reward_metrics
from rollout.analyses.samples import mean_pass_at_k
from rollout.engine import EpisodeJob, RolloutEngine
from rollout.results import result_row
from visor.models.transformers import TransformersClient
from visor.models.vllm import VLLMClient
from visor.stage_clock import CLOCK
from visor.types import Question, Trajectory, derive_seed


class Validation:
    """Answers the validation questions with the policy in training.

    It draws from no random state of the run and shares no image features with its rollouts, so training is
    the same with and without it. Episode seeds follow from (run seed, question id, sample, turn): two
    validations differ by the policy alone.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        client: TransformersClient | VLLMClient,
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
            records = (record for _, record, _ in done)
            write_trajectories(self.output_dir / VALIDATIONS, step, records)
        rows = [row for _, _, row in done]
        figures = reward_metrics(rows)
        figures |= {name: mean_pass_at_k(rows, k) for name, k in pass_figures(self.num_samples).items()}
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
        self._clear_cache()
        trajectories = self.engine.run([job for _, job in jobs])
        self._clear_cache()
        mine = [
            (place, _record(trajectory), result_row(trajectory, job.question))
            for (place, job), trajectory in zip(jobs, trajectories, strict=True)
        ]
        with CLOCK.running("gather"):
            return sorted(gather_object(mine), key=lambda item: item[0])

    def _clear_cache(self) -> None:
        # An engine files features under the picture itself, and forgets them when it is given new weights.
        if isinstance(self.client, TransformersClient):
            self.client.clear_cache()

    def append(self, line: dict) -> None:
        """Add an evaluation to validation.jsonl; until then it counts as not done."""
        append_line(self.output_dir / VALIDATION_METRICS, line)

    def line_of(self, step: int) -> dict | None:
        """The line of the evaluation at a step, or None."""
        lines = read_rows(self.output_dir / VALIDATION_METRICS)
        return next((line for line in lines if line["step"] == step), None)


def _record(trajectory: Trajectory) -> dict:
    """Without the prompt's token ids, which follow from its messages."""
    return trajectory.model_dump(
        mode="json", exclude={"turns": {"__all__": {"completion": {"prompt_token_ids"}}}}
    )
