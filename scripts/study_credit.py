"""Turn credit against trajectory credit: the study's GRPO runs from the same SFT policies, step by step.

    python -m scripts.study --only 'seed*/evaluate/sft-*' 'seed*/evaluate/grpo-sampled' \
        'seed*/evaluate/grpo-greedy' 'seed*/evaluate/grpo_trajectory-*'
    python -m scripts.study_credit --output docs

The two runs of a seed differ in `credit` and in the rows of a forward pass, nothing else.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollout.curves import read_metrics, smooth
from scripts.study import SEEDS, STUDY, TEMPERATURES
from scripts.study_stats import seed_mean
from scripts.study_tables import difference_table, hop, read_runs
from scripts.study_text import Table, render

MODES = {"turn": "grpo", "trajectory": "grpo_trajectory"}
"""Credit → policy of the study."""
CURVES = ("reward", "accuracy", "verification_share", "invalid_action_rate")
TITLES = ("Reward", "Accuracy", "Share of Δ = 1", "Invalid-action rate")
COLUMNS = (*CURVES, "logprob_gap_mean", "logprob_gap_max", "kl", "rows", "trained_tokens", "grad_norm")
SPAN = 10
"""Steps of the moving mean in the picture."""

Curves = dict[str, dict[int, list[dict]]]
"""Credit → seed → metrics lines."""


def read_curves(study: Path) -> Curves:
    """ValueError when a mode has no finished run."""
    curves: Curves = {}
    for credit, policy in MODES.items():
        for seed in SEEDS:
            path = study / f"seed{seed}" / "policy" / policy / "metrics.jsonl"
            if path.is_file():
                curves.setdefault(credit, {})[seed] = read_metrics(path)
        if credit not in curves:
            raise ValueError(f"{study} has no run of {policy!r} yet; run the study's stages first")
    return curves


def write_csv(path: Path, curves: Curves) -> None:
    """One line a credit mode, seed and step."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("credit", "seed", "step", *COLUMNS))
        for credit, by_seed in curves.items():
            for seed, lines in by_seed.items():
                for line in lines:
                    writer.writerow((credit, seed, line["step"], *(rounded(line.get(c)) for c in COLUMNS)))


def rounded(value: float | None) -> float | None:
    return round(value, 5) if isinstance(value, float) else value


def plot(path: Path, curves: Curves) -> None:
    """The mean over seeds of each figure's moving mean, and the range of the seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, name, title in zip(figure.subplots(2, 2).flat, CURVES, TITLES, strict=True):
        for credit, by_seed in curves.items():
            steps, low, mean, high = bands(by_seed, name)
            (line,) = axes.plot(steps, mean, linewidth=2, label=f"{credit} credit")
            axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2)
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=110)


def bands(by_seed: Mapping[int, Sequence[Mapping]], name: str) -> tuple[list, list, list, list]:
    """(steps, lowest, mean, highest seed) of the moving mean; steps that every seed has."""
    smoothed = {
        seed: dict(zip((line["step"] for line in lines), smooth([line.get(name) for line in lines], SPAN)))
        for seed, lines in by_seed.items()
    }
    steps = sorted(set.intersection(*(set(values) for values in smoothed.values())))
    at = [[values[step] for values in smoothed.values()] for step in steps]
    return steps, [min(v) for v in at], [sum(v) / len(v) for v in at], [max(v) for v in at]


def gap_table(curves: Curves) -> Table:
    """Mean over the steps, by seed."""
    rows = []
    for credit, by_seed in curves.items():
        cells = [
            seed_mean({seed: mean_of(lines, column) for seed, lines in by_seed.items()})
            for column in ("logprob_gap_mean", "logprob_gap_max", "kl", "rows", "trained_tokens")
        ]
        update = seed_mean(
            {s: mean_of([x["seconds"] for x in lines], "update") for s, lines in by_seed.items()}
        )
        rows.append((credit, len(by_seed), *cells, update))
    caption = "Means over the steps of a run, then over seeds; gap: |log p under the row − log p as sampled|."
    header = ("credit", "seeds", "gap, mean", "gap, largest", "kl", "rows", "trained tokens", "update, s")
    return Table("Rows and log-probability gap", caption, header, rows)


def mean_of(lines: Sequence[Mapping], name: str) -> float | None:
    values = [line[name] for line in lines if line.get(name) is not None]
    return sum(values) / len(values) if values else None


def tables(study: Path, curves: Curves) -> list[Table]:
    single = hop(read_runs(study), "single")
    start = "sft"
    names = [(start, MODES["turn"]), (start, MODES["trajectory"]), (MODES["trajectory"], MODES["turn"])]
    pairs = [
        (f"{a}-{decoding}", single[f"{a}-{decoding}"], f"{b}-{decoding}", single[f"{b}-{decoding}"])
        for decoding in TEMPERATURES
        for a, b in names
        if f"{a}-{decoding}" in single and f"{b}-{decoding}" in single
    ]
    caption = "Single-hop test questions, paired by seed and question; 95 % bootstrap over questions."
    return [difference_table("Differences", caption, pairs), gap_table(curves)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.study_credit", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--study", type=Path, default=STUDY)
    parser.add_argument("--output", type=Path, default=STUDY / "curves", help="folder (default %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        curves = read_curves(arguments.study)
    except ValueError as error:
        parser.error(str(error))
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_csv(arguments.output / "credit_modes.csv", curves)
    plot(arguments.output / "credit_modes.png", curves)
    print("\n\n".join(render(table) for table in tables(arguments.study, curves)))


if __name__ == "__main__":
    main()
