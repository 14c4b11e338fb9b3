"""Curves of the study's GRPO policies, training and validation: mean over seeds by step, as CSV and PNG."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from data.questions import load_questions
from data.slide_world import Slide, read_slides
from grpo.figures import FIGURES
from rollout.curves import plot_curves, read_metrics
from rollout.recorder import read_lines
from rollout.results import result_row
from scripts.slide_reading import page_replies
from visor.types import Question, Trajectory

READING = "read_exactly"
METRICS = (*FIGURES, "kl", "entropy", READING)
KL = "KL to the start, log scale"
PANELS = {
    "Reward": ["reward"],
    "Accuracy and pages read exactly": ["accuracy", READING],
    "Searches after the last gold page": ["no_verification_share", "verification_share", "over_search_share"],
    "Invalid actions": ["invalid_action_rate"],
    KL: ["kl"],
    "Entropy": ["entropy"],
}


def mean_curve(by_seed: Mapping[int, Sequence[Mapping]]) -> list[dict]:
    """Metrics lines of several seeds → one line a step: `seeds` (how many have the step) and the mean of each
    metric over the seeds that have it, None where none has."""
    steps = sorted({line["step"] for lines in by_seed.values() for line in lines})
    curve = []
    for step in steps:
        there = [line for lines in by_seed.values() for line in lines if line["step"] == step]
        values = {name: [line[name] for line in there if line.get(name) is not None] for name in METRICS}
        means = {name: sum(known) / len(known) if known else None for name, known in values.items()}
        curve.append({"step": step, "seeds": len(there)} | means)
    return curve


def reading_by_step(
    rollouts: Path, questions: Mapping[str, Question], slides: Mapping[str, Slide]
) -> dict[int, float | None]:
    """Share of shown pages read exactly in the recorded rollouts (`step-N.jsonl`) of each step."""
    shares = {}
    for path in rollouts.glob("step-*.jsonl"):
        exact = []
        for record in read_lines(path):
            trajectory = Trajectory.model_validate(record)
            row = result_row(trajectory, questions[trajectory.question_id])
            exact += [reply.exact for reply in page_replies(trajectory, row, slides)]
        shares[int(path.stem.removeprefix("step-"))] = sum(exact) / len(exact) if exact else None
    return shares


def write_curves(study: Path, policies: Mapping[str, Sequence[int]]) -> list[Path]:
    """Write `curves/NAME.csv`, `.jsonl` and `.png` for each policy (name → seeds) that has metrics, and
    `NAME-validation.csv` where it has validations; returns the pictures."""
    split = study / "world" / "rl"
    slides = read_slides(split / "slides.jsonl")
    questions = {q.question_id: q for q in load_questions(f"questions:{split / 'questions.jsonl'}")}
    pictures = []
    for name, seeds in policies.items():
        by_seed, validation = {}, {}
        for seed in seeds:
            folder = study / f"seed{seed}" / "policy" / name
            if (folder / "validation.jsonl").is_file():
                validation[seed] = read_metrics(folder / "validation.jsonl")
            if not (folder / "metrics.jsonl").is_file():
                continue
            reading = reading_by_step(folder / "rollouts", questions, slides)
            lines = read_metrics(folder / "metrics.jsonl")
            by_seed[seed] = [line | {READING: reading.get(line["step"])} for line in lines]
        if any(validation.values()):
            _write_csv(study / "curves" / f"{name}-validation.csv", mean_curve(validation))
        if any(by_seed.values()):
            pictures.append(_write(study / "curves", name, mean_curve(by_seed)))
    return pictures


def _write(folder: Path, name: str, curve: list[dict]) -> Path:
    _write_csv(folder / f"{name}.csv", curve)
    lines = folder / f"{name}.jsonl"
    lines.write_text("".join(json.dumps(line) + "\n" for line in curve))
    return plot_curves(lines, folder / f"{name}.png", panels=PANELS, log_panels=[KL])


def _write_csv(path: Path, curve: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ("step", "seeds", *METRICS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(curve)
