"""The demo's table and `summary.json`, from the run folders of its evaluations."""

from __future__ import annotations

import json
from pathlib import Path

KEYS = (
    "n",
    "accuracy",
    "completeness",
    "verification_share",
    "over_search_share",
    "invalid_action_rate",
    "finish_rate",
    "mean_reward",
    "mean_searches",
    "mean_context_images",
)
CURVE_KEYS = ("step", "reward", "accuracy", "completeness", "verification_share", "invalid_action_rate")
COLUMNS = {
    "accuracy": "accuracy",
    "completeness": "complete",
    "verification_share": "Δ=1",
    "over_search_share": "Δ≥2",
    "invalid_action_rate": "invalid",
    "finish_rate": "finished",
    "mean_reward": "reward",
    "mean_searches": "searches",
    "mean_context_images": "images",
}


def write_summary(demo: Path, seconds: dict[str, float], rows: list[str]) -> None:
    """Write `summary.json` and print the table."""
    evaluation = {row: evaluation_entry(demo / "evaluate", row) for row in rows}
    curve = [
        json.loads(line) for line in (demo / "policy" / "grpo" / "metrics.jsonl").read_text().splitlines()
    ]
    summary = {
        "schema_version": 1,
        "seconds": {**{k: round(v, 1) for k, v in seconds.items()}, "total": round(sum(seconds.values()), 1)},
        "evaluation": evaluation,
        "grpo_curve": [{key: point[key] for key in CURVE_KEYS} for point in curve],
    }
    (demo / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(table(evaluation))
    print(f"seconds: {summary['seconds']}")
    for name in ("summary.json", "curves.png", "report.html"):
        print(demo / name)


def evaluation_entry(folder: Path, row: str) -> dict:
    """Single-hop sampled figures, and the same under `greedy` and under `multi_hop` (sampled)."""
    sampled, greedy = (
        json.loads((folder / f"{row}-{decoding}" / "metrics.json").read_text())["by_tag"]["hop"]
        for decoding in ("sampled", "greedy")
    )
    return {
        **_pick(sampled["single"]),
        "greedy": _pick(greedy["single"]),
        "multi_hop": _pick(sampled["multi"]),
    }


def _pick(metrics: dict) -> dict:
    return {key: metrics[key] for key in KEYS}


def table(evaluation: dict[str, dict]) -> str:
    """A plain-text table, one line a policy and question set."""
    lines = []
    for title, entries in (
        ("single-hop, sampled at temperature 1", evaluation),
        ("single-hop, greedy", {row: entry["greedy"] for row, entry in evaluation.items()}),
        (
            "multi-hop, sampled at temperature 1",
            {row: entry["multi_hop"] for row, entry in evaluation.items()},
        ),
    ):
        n = next(iter(entries.values()))["n"]
        lines += ["", f"{title} (n = {n})", "  ".join(["policy   ", *(f"{c:>8}" for c in COLUMNS.values())])]
        lines += [
            "  ".join([f"{row:<9}", *(f"{_number(entry[key]):>8}" for key in COLUMNS)])
            for row, entry in entries.items()
        ]
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
