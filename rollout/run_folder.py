"""A run folder: trajectories, result rows and metrics, written as the run goes, resumed after a kill."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
        self.keys: set[Key] = set()
        """Of the rows that the folder holds. The rows themselves stay on the disk, however many there are."""
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
        path, results = self.path / TRAJECTORIES_NAME, self.path / RESULTS_NAME
        mend(path)
        found = _Found()
        # The result rows are written as the trajectories are read, one at a time.
        rewrite(results, self._taken_in(engine, retry_failed, jobs, found))
        if found.judged:
            rewrite(results, (found.row(record) for record in read_lines(results)))
        if found.dropped or found.judged:
            kept = (record for record in read_lines(path) if sample_key(record) in self.keys)
            rewrite(path, (found.trajectory(record) for record in kept))
        self._trajectories = Recorder(path, sync_every=self._sync_every)
        # Not synced as it grows: it follows from the trajectories, and is made again from them.
        self._results = Recorder(results, sync_every=0)

    def _taken_in(
        self, engine: RolloutEngine, retry_failed: bool, jobs: Collection[Key] | None, found: _Found
    ) -> Iterator[dict[str, Any]]:
        """The result rows of the stored trajectories that stay; those without a verdict are judged again, and
        what comes of it is put into `found`."""
        waiting: list[Trajectory] = []
        for record in read_lines(self.path / TRAJECTORIES_NAME):
            trajectory = Trajectory.model_validate(record)
            key, row = sample_key(record), result_row(trajectory, self._question(trajectory))
            if retry_failed and row.error and (jobs is None or key in jobs):
                found.dropped += 1
                continue
            self.keys.add(key)
            yield row.model_dump(mode="json")
            if retry_failed and _lacks_verdict(row):
                waiting.append(trajectory)
                if len(waiting) == JUDGED_AT_ONCE:
                    self._judge_again(engine, waiting, found)
                    waiting = []
        self._judge_again(engine, waiting, found)

    def _judge_again(self, engine: RolloutEngine, trajectories: Sequence[Trajectory], found: _Found) -> None:
        """Score trajectories anew, all at once."""
        pairs = [(trajectory, self._question(trajectory)) for trajectory in trajectories]
        for (trajectory, question), reward in zip(pairs, engine.score_all(pairs), strict=True):
            trajectory.reward = reward
            key = trajectory.question_id, trajectory.sample_index
            row = result_row(trajectory, question).model_dump(mode="json")
            found.judged[key] = reward.model_dump(mode="json"), row

    def missing(self, jobs: Iterable[EpisodeJob]) -> list[EpisodeJob]:
        """The jobs that have no row yet."""
        return [job for job in jobs if job.key not in self.keys]

    def add(self, job: EpisodeJob, trajectory: Trajectory) -> ResultRow:
        """Write one finished job, and return its row."""
        assert self._trajectories is not None, "resume() opens the folder"
        assert self._results is not None
        row = result_row(trajectory, job.question)
        self._trajectories.append(trajectory if self._prompt_ids else _without_prompt_ids(trajectory))
        self._results.append(row)
        self.keys.add(job.key)
        return row

    def finish(self) -> Metrics:
        """Close the files, write metrics.json over all rows of the folder and return the metrics."""
        self.close()
        metrics = summarise(self.rows())
        write_json(self.path / METRICS_NAME, metrics)
        return metrics

    def rows(self) -> list[ResultRow]:
        """All result rows of the folder, read from the disk."""
        return [ResultRow.model_validate(record) for record in read_lines(self.path / RESULTS_NAME)]

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


@dataclass
class _Found:
    """What taking in the stored trajectories changes."""

    dropped: int = 0
    """Rows with a fault, whose questions are asked again."""
    judged: dict[Key, tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=dict)
    """Reward and result row of each answer that was judged again."""

    def row(self, record: dict[str, Any]) -> dict[str, Any]:
        """A result row as it stands now."""
        judged = self.judged.get(sample_key(record))
        return judged[1] if judged else record

    def trajectory(self, record: dict[str, Any]) -> dict[str, Any]:
        """A stored trajectory as it stands now."""
        judged = self.judged.get(sample_key(record))
        return record | {"reward": judged[0]} if judged else record


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
