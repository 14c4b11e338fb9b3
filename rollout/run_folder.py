"""A run folder: trajectories, result rows and metrics, written as the run goes, resumed after a kill."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.engine import EpisodeJob, RolloutEngine
from rollout.manifest import write_json
from rollout.metrics import Metrics, summarise
from rollout.recorder import Key, Recorder, mend, read_lines, rewrite, sample_key
from rollout.results import ResultRow, result_row
from visor.types import Completion, Question, Trajectory

TRAJECTORIES_NAME = "trajectories.jsonl"
RESULTS_NAME = "results.jsonl"
METRICS_NAME = "metrics.json"
JUDGED_AT_ONCE = 256
"""Stored answers that are held in memory while they are judged again."""


class RunFolder:
    """The rows of one evaluation run.

    `trajectories.jsonl` is what counts; `results.jsonl` is made from it and made again when a run resumes,
    so that the two agree whatever a kill left behind.
    """

    def __init__(
        self,
        path: str | Path,
        questions: Mapping[str, Question],
        sync_every: int = 1,
        prompt_ids: bool = False,
    ) -> None:
        """`questions` by id; a stored row of another question is an error, raised by `resume`.

        `prompt_ids`: write the prompt's token ids of each call, which follow from its messages.
        """
        self.path = Path(path)
        self.questions = questions
        self.rows: dict[Key, ResultRow] = {}
        self._sync_every = sync_every
        self._prompt_ids = prompt_ids
        self._trajectories: Recorder | None = None
        self._results: Recorder | None = None

    def resume(
        self, engine: RolloutEngine, retry_failed: bool = True, jobs: Collection[Key] | None = None
    ) -> None:
        """Open the folder and take in what it holds.

        With `retry_failed`, rows with a fault are dropped, so that their questions are asked again, and
        answers that got no verdict are judged again; nothing else is asked twice. Only rows of `jobs` (None:
        all) are dropped: what this run does not ask again stays on record as failed.
        """
        path = self.path / TRAJECTORIES_NAME
        mend(path)
        judged: dict[Key, dict[str, Any]] = {}
        waiting: list[Trajectory] = []
        dropped = 0
        for record in read_lines(path):
            trajectory = Trajectory.model_validate(record)
            key, row = sample_key(record), result_row(trajectory, self._question(trajectory))
            if retry_failed and row.error and (jobs is None or key in jobs):
                dropped += 1
                continue
            self.rows[key] = row
            if retry_failed and _lacks_verdict(row):
                waiting.append(trajectory)
                if len(waiting) == JUDGED_AT_ONCE:
                    judged |= self._judge_again(engine, waiting)
                    waiting = []
        judged |= self._judge_again(engine, waiting)
        if dropped or judged:
            rewrite(path, self._kept_records(path, judged))
        rewrite(self.path / RESULTS_NAME, (row.model_dump(mode="json") for row in self.rows.values()))
        self._trajectories = Recorder(path, sync_every=self._sync_every)
        # Not synced as it grows: it follows from the trajectories, and is made again from them.
        self._results = Recorder(self.path / RESULTS_NAME, sync_every=0)

    def _judge_again(
        self, engine: RolloutEngine, trajectories: Sequence[Trajectory]
    ) -> dict[Key, dict[str, Any]]:
        """Score trajectories anew, all at once; their rows are replaced. Returns the rewards as stored."""
        pairs = [(trajectory, self._question(trajectory)) for trajectory in trajectories]
        judged = {}
        for (trajectory, question), reward in zip(pairs, engine.score_all(pairs), strict=True):
            trajectory.reward = reward
            key = trajectory.question_id, trajectory.sample_index
            self.rows[key] = result_row(trajectory, question)
            judged[key] = reward.model_dump(mode="json")
        return judged

    def _kept_records(self, path: Path, judged: Mapping[Key, dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The stored trajectories that have a row, with their new rewards; read one at a time."""
        for record in read_lines(path):
            key = sample_key(record)
            if key in self.rows:
                yield record | ({"reward": judged[key]} if key in judged else {})

    def missing(self, jobs: Iterable[EpisodeJob]) -> list[EpisodeJob]:
        """The jobs that have no row yet."""
        return [job for job in jobs if job.key not in self.rows]

    def add(self, job: EpisodeJob, trajectory: Trajectory) -> None:
        """Write one finished job; for `RolloutEngine.run`'s `on_done`."""
        assert self._trajectories is not None, "resume() opens the folder"
        assert self._results is not None
        row = result_row(trajectory, job.question)
        self._trajectories.append(trajectory if self._prompt_ids else _without_prompt_ids(trajectory))
        self._results.append(row)
        self.rows[row.question_id, row.sample_index] = row

    def finish(self) -> Metrics:
        """Close the files, write metrics.json over all rows of the folder and return the metrics."""
        self.close()
        metrics = summarise(list(self.rows.values()))
        write_json(self.path / METRICS_NAME, metrics)
        return metrics

    def close(self) -> None:
        for recorder in (self._trajectories, self._results):
            if recorder:
                recorder.close()

    def _question(self, trajectory: Trajectory) -> Question:
        if trajectory.question_id not in self.questions:
            raise ValueError(
                f"{self.path / TRAJECTORIES_NAME} has a row of question {trajectory.question_id!r}, which is "
                "not in the question set; take another output folder"
            )
        return self.questions[trajectory.question_id]


def _without_prompt_ids(trajectory: Trajectory) -> Trajectory:
    """The trajectory without the prompts' ids, whose number stays."""
    turns = [
        turn.model_copy(update={"completion": _without_ids(turn.completion)}) for turn in trajectory.turns
    ]
    return trajectory.model_copy(update={"turns": turns})


def _without_ids(completion: Completion) -> Completion:
    if completion.prompt_token_ids is None:
        return completion
    count = len(completion.prompt_token_ids)
    return completion.model_copy(update={"prompt_token_ids": None, "prompt_tokens": count})


def _lacks_verdict(row: ResultRow) -> bool:
    """The judge failed: an answer without a verdict, or no reward where there could be one."""
    return row.unjudged or (row.reward is None and bool(row.gold_page_ids) and not row.error)
