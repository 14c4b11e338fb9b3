"""Training curves as a PNG, from the metrics lines of a GRPO run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

PANELS = {
    "Reward": ["reward"],
    "Accuracy and completeness": ["accuracy", "completeness"],
    "Searches after the last gold page": ["verification_share", "over_search_share"],
    "Invalid actions and finished episodes": ["invalid_action_rate", "finish_rate"],
}
"""Panel title → metrics drawn in it."""


def read_metrics(path: str | Path) -> list[dict]:
    """The lines of a metrics.jsonl, by step; the last line of a repeated step counts (a resumed run).

    A torn last line is left out. ValueError names any other line that is not a JSON object with a step.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    steps: dict[int, dict] = {}
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            steps[record["step"]] = record
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: not a metrics line with a step") from error
    return [steps[step] for step in sorted(steps)]


def smooth(values: list[float | None], span: int) -> list[float | None]:
    """Mean over the last `span` values that are there; None while there are none."""
    means = []
    for end in range(1, len(values) + 1):
        known = [value for value in values[max(0, end - span) : end] if value is not None]
        means.append(sum(known) / len(known) if known else None)
    return means


def plot_curves(metrics_jsonl: str | Path, out_png: str | Path, span: int = 10) -> Path:
    """Draw reward, accuracy, completeness, verification share and invalid rate over the steps.

    The thin line is each step, the thick one the mean over the last `span` steps. Needs matplotlib (the
    `report` extra). Returns the path written; ValueError for a file without a step.
    """
    records = read_metrics(metrics_jsonl)
    if not records:
        raise ValueError(f"{metrics_jsonl} holds no step yet: nothing to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, names) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        for name in (name for name in names if any(name in record for record in records)):
            _draw(axes, records, name, span)
        if axes.lines:
            axes.legend(frameon=False)
    figure.savefig(out_png, dpi=110)
    return Path(out_png)


def _draw(axes, records: list[dict], name: str, span: int) -> None:
    """One metric; matplotlib leaves a gap at NaN."""
    steps = [record["step"] for record in records]
    values = [record.get(name) for record in records]
    gaps = [[float("nan") if v is None else v for v in series] for series in (values, smooth(values, span))]
    (thin,) = axes.plot(steps, gaps[0], alpha=0.3, linewidth=1)
    axes.plot(steps, gaps[1], color=thin.get_color(), linewidth=2, label=name.replace("_", " "))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m rollout.curves", description="Draw training curves.")
    parser.add_argument("metrics", type=Path, help="metrics.jsonl of a GRPO run")
    parser.add_argument("output", type=Path, help="PNG")
    arguments = parser.parse_args(argv)
    if not arguments.metrics.is_file():
        parser.error(f"there is no file {arguments.metrics}")
    print(plot_curves(arguments.metrics, arguments.output))


if __name__ == "__main__":
    main()
