"""The best and the worst trajectory of a step, as text a person reads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerate.utils import gather_object

from grpo.behaviour import reward_parts
from grpo.records import HIGHLIGHTS
from rollout.group import Group
from rollout.trace import ending_text, printable, turn_text
from visor.types import Question, RewardBreakdown, Trajectory


@dataclass(frozen=True)
class Highlight:
    """One trajectory."""

    reward: float
    name: str
    """question_id/sample_index."""
    text: str


def best_and_worst(groups: Sequence[Group]) -> tuple[Highlight, Highlight] | None:
    """Of the scored trajectories of all processes; None when none is scored. Of equal rewards the first by
    name, so that the choice depends on nothing else."""
    everyone: list[Highlight] = gather_object(
        [
            Highlight(
                trajectory.reward.total,
                f"{trajectory.question_id}/{trajectory.sample_index}",
                trajectory_text(trajectory, group.question),
            )
            for group in groups
            for trajectory in group.trajectories
            if trajectory.reward and trajectory.reward.total is not None
        ]
    )
    if not everyone:
        return None
    return (
        min(everyone, key=lambda item: (-item.reward, item.name)),
        min(everyone, key=lambda item: (item.reward, item.name)),
    )


def trajectory_text(trajectory: Trajectory, question: Question) -> str:
    """Question, turns, answer and reward of one trajectory."""
    lines = [
        f"question {printable(question.question_id)}, sample {trajectory.sample_index}: "
        f"{printable(question.text)}",
        f"gold answers: {'; '.join(map(printable, question.gold_answers)) or '–'}",
        f"gold pages:   {', '.join(map(printable, question.gold_page_ids)) or '–'}",
        *(turn_text(turn) for turn in trajectory.turns),
        ending_text(trajectory),
    ]
    if trajectory.reward:
        lines.append(_reward_text(trajectory.reward))
    return "\n".join(lines)


def write_highlights(output_dir: Path, step: int, best: Highlight, worst: Highlight) -> None:
    """Write `highlights/step-N.txt` as a whole."""
    folder = output_dir / HIGHLIGHTS
    folder.mkdir(parents=True, exist_ok=True)
    text = f"best of step {step}\n{best.text}\n\nworst of step {step}\n{worst.text}\n"
    beside = folder / f"step-{step}.txt.tmp"
    beside.write_text(text, encoding="utf-8", errors="replace")
    os.replace(beside, folder / f"step-{step}.txt")


def _reward_text(reward: RewardBreakdown) -> str:
    if reward.total is None:
        return f"unscored: {printable(reward.unscored_reason)}"
    parts = ", ".join(f"{name} {value:g}" for name, value in reward_parts(reward).items())
    delta = "incomplete" if reward.delta is None else f"Δ = {reward.delta}"
    return f"reward: {reward.total:g}  ({parts}; {delta}; judge {reward.judge or '–'})"
