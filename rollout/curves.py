"""Training curves as a PNG, from the metrics lines of a GRPO run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping, Sequence
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


def plot_curves(
    metrics_jsonl: str | Path,
    out_png: str | Path,
    span: int = 10,
    panels: Mapping[str, Sequence[str]] = PANELS,
    log_panels: Collection[str] = (),
) -> Path:
    """Draw metrics over the steps, two panels a row; `panels` says which, by default reward, accuracy,
    completeness, verification share and invalid rate, and `log_panels` which of them have a log scale.

    The thin line is each step, the thick one the mean over the last `span` steps. Needs matplotlib (the
    `report` extra). Returns the path written; ValueError for a file without a step.
    """
    records = read_metrics(metrics_jsonl)
    if not records:
        raise ValueError(f"{metrics_jsonl} holds no step yet: nothing to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = (len(panels) + 1) // 2
    figure = Figure(figsize=(10, 3.2 * height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(height, 2, squeeze=False).flat
    for axes, (title, names) in zip(grid, panels.items(), strict=False):
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if title in log_panels:
            axes.set_yscale("log", nonpositive="mask")
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
