"""What a run tells while it goes: metrics, trajectories, alarms, trackers and the line on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from accelerate.utils import gather_object

from grpo.alarms import Alarm, newly_raised, standing
from grpo.arguments import GrpoConfig
from grpo.highlights import best_and_worst, write_highlights
from grpo.records import METRICS, ROLLOUTS, append_line, read_rows, write_trajectories
from grpo.step_metrics import summary
from grpo.trackers import fenced, numbers
from rollout.group import Group
from rollout.results import ResultRow, result_row

REMAINING_OVER = 20
"""Steps whose mean duration says how long the rest takes."""


class Journal:
    """Writes the records of a run's steps below its folder; only the main process writes."""

    def __init__(self, config: GrpoConfig, accelerator) -> None:
        self.config = config
        self.accelerator = accelerator
        self.output_dir = Path(config.output_dir)
        self.history: list[dict] = []
        """The metrics lines so far, on the main process."""

    def read_back(self) -> None:
        """Take the lines of the steps already done, on the main process."""
        self.history = read_rows(self.output_dir / METRICS)

    def record(self, step: int, groups: list[Group]) -> list[ResultRow]:
        """Write the step's trajectories to `rollouts/step-N.jsonl`; returns all processes' result rows."""
        lines = gather_object([t.model_dump(mode="json") for group in groups for t in group.trajectories])
        if self.accelerator.is_main_process:
            write_trajectories(self.output_dir / ROLLOUTS, step, lines)
        return gather_object([result_row(t, group.question) for group in groups for t in group.trajectories])

    def record_highlights(self, step: int, groups: list[Group]) -> None:
        """The best and the worst trajectory into `highlights/step-N.txt`, and to the trackers as text."""
        every = self.config.log_trajectories_steps
        if every is None or step % every:
            return
        found = best_and_worst(groups)
        if found is None or not self.accelerator.is_main_process:
            return
        best, worst = found
        write_highlights(self.output_dir, step, best, worst)
        if self.config.report_to:
            texts = {"trajectories/best": best.text, "trajectories/worst": worst.text}
            self.accelerator.log({name: fenced(text) for name, text in texts.items()}, step=step)

    def watch(self, metrics: dict) -> list[Alarm]:
        """Enter the standing alarms into the step's line; returns those that were just raised, on the main
        process."""
        if not self.accelerator.is_main_process:
            return []
        self.history.append(metrics)
        alarms = standing(self.history, self.config.alarms)
        metrics["alarms"] = [alarm.name for alarm in alarms]
        return newly_raised(alarms, self.history)

    def log(self, metrics: dict) -> None:
        """Append the step's line, send it to the trackers and print its summary."""
        if not self.accelerator.is_main_process:
            return
        append_line(self.output_dir / METRICS, metrics)
        self.report(metrics, metrics["step"])
        seconds = [row["seconds"]["total"] for row in self.history[-REMAINING_OVER:]]
        self.accelerator.print(summary(metrics, self.config.max_steps, _mean(seconds)), flush=True)

    def report(self, figures: dict, step: int) -> None:
        """Send the numbers among the figures to the trackers."""
        if self.config.report_to:
            self.accelerator.log(numbers({k: v for k, v in figures.items() if k != "step"}), step=step)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
