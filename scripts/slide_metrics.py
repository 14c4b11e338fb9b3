"""Figures of evaluation runs in the slide world: task, pages read exactly, absent facts, causes of errors.

    python -m scripts.slide_metrics RUN [RUN ...] --slides runs/demo/world/test/slides.jsonl

One column a run folder. `--json FILE` writes the same figures for a program.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.slide_world import Slide, read_slides
from rollout.compare import load_results
from rollout.metrics import headline
from rollout.recorder import sample_key
from rollout.results import ResultRow
from rollout.run_folder import TRAJECTORIES_NAME
from rollout.tables import format_table
from scripts.slide_reading import (
    Cause,
    PageReply,
    Says,
    cause,
    claims_right,
    correct_and_complete,
    page_replies,
)
from visor.types import Trajectory

HOPS = ("single", "multi")
TASK = {
    "accuracy": "accuracy",
    "completeness": "completeness",
    "no_verification_share": "Δ=0",
    "verification_share": "Δ=1",
    "over_search_share": "Δ≥2",
    "mean_reward": "reward",
    "invalid_action_rate": "invalid actions",
    "finish_rate": "finished",
    "mean_searches": "searches",
}
"""Figures of `rollout.metrics.headline` that are reported, and their names in a table."""


@dataclass(frozen=True)
class Episode:
    """One recorded episode: its row, and its replies to pages."""

    row: ResultRow
    replies: list[PageReply]
    prompt_tokens: list[int]
    """Of each call; empty unless the run recorded them (`prompt_ids`)."""

    @property
    def hop(self) -> str:
        return self.row.tags["hop"]


def make_episode(trajectory: Trajectory, row: ResultRow, slides: Mapping[str, Slide]) -> Episode:
    prompts = [turn.completion.prompt_token_ids for turn in trajectory.turns]
    return Episode(
        row, page_replies(trajectory, row, slides), [len(ids) for ids in prompts if ids is not None]
    )


def read_run(folder: Path, slides: Mapping[str, Slide]) -> list[Episode]:
    """The episodes of a run folder; ValueError for one without results."""
    rows = {(row.question_id, row.sample_index): row for row in load_results(folder)}
    episodes = []
    with (folder / TRAJECTORIES_NAME).open(encoding="utf-8") as lines:
        for line in lines:
            trajectory = Trajectory.model_validate_json(line)
            row = rows[
                sample_key({"question_id": trajectory.question_id, "sample_index": trajectory.sample_index})
            ]
            episodes.append(make_episode(trajectory, row, slides))
    return episodes


def task_figures(episodes: Sequence[Episode]) -> dict[str, float | None]:
    """Accuracy with and without completeness, Δ, reward, format; None without a denominator."""
    known = headline([episode.row for episode in episodes])
    complete = _share([correct_and_complete(episode.row) for episode in episodes])
    return {"n": len(episodes), "accuracy, complete": complete} | {
        name: known[key] for key, name in TASK.items()
    }


def reading_figures(episodes: Sequence[Episode]) -> dict[str, float | None]:
    """Share of shown pages that the next reply describes exactly; every such reply is in the denominator."""
    replies = [reply for episode in episodes for reply in episode.replies]
    return {
        "pages": len(replies),
        "read exactly": _share([r.exact for r in replies]),
        "gold pages": _share([r.exact for r in replies if r.gold]),
        "other pages": _share([r.exact for r in replies if not r.gold]),
        "- before the gold page": _share([r.exact for r in replies if not r.gold and r.before_gold]),
        "- after it (verification)": _share([r.exact for r in replies if not r.gold and not r.before_gold]),
    }


def fact_figures(episodes: Sequence[Episode]) -> dict[str, dict[str, float | None]]:
    """Single-hop: what the replies say of the asked fact on pages without it that come before the gold page,
    on gold pages, and on the pages after it; shares of each kind of page."""
    pairs = [(reply, episode.row) for episode in episodes for reply in episode.replies]
    kinds = {
        "pages without the fact": [(r, row) for r, row in pairs if not r.gold and r.before_gold],
        "gold pages": [(r, row) for r, row in pairs if r.gold],
        "pages after the gold page": [(r, row) for r, row in pairs if not r.gold and not r.before_gold],
    }
    return {kind: _what_is_said(members) for kind, members in kinds.items()}


def _what_is_said(pairs: Sequence[tuple[PageReply, ResultRow]]) -> dict[str, float | None]:
    right = [claims_right(reply, row) for reply, row in pairs]
    claims = [reply.says == Says.VALUE for reply, _ in pairs]
    return {
        "n": len(pairs),
        "not found": _share([reply.says == Says.ABSENT for reply, _ in pairs]),
        "claims a value": _share(claims),
        "right value": _share(right),
        "wrong value": _share([claim and not ok for claim, ok in zip(claims, right, strict=True)]),
        "neither": _share([reply.says == Says.NEITHER for reply, _ in pairs]),
    }


def cause_counts(episodes: Sequence[Episode]) -> dict[str, int]:
    """Single-hop: episodes without a right answer after complete retrieval, by cause."""
    counts = Counter(cause(episode.row, episode.replies) for episode in episodes)
    return {"errors": len(episodes) - counts[None]} | {str(name): counts[name] for name in Cause}


def run_figures(episodes: Sequence[Episode]) -> dict[str, dict[str, float | None]]:
    """All figures of a run by table; `multi-hop` is apart from the rest."""
    single, multi = ([e for e in episodes if e.hop == hop] for hop in HOPS)
    tables = {
        "single-hop": task_figures(single),
        "page reading (single-hop)": reading_figures(single),
        **{f"said of the fact: {kind}": figures for kind, figures in fact_figures(single).items()},
        "causes of errors (single-hop)": cause_counts(single),
    }
    if multi:
        reading = reading_figures(multi)
        tables["multi-hop"] = task_figures(multi) | {"read exactly": reading["read exactly"]}
    return tables


def render(runs: Mapping[str, Mapping[str, Mapping[str, float | None]]], style: str = "markdown") -> str:
    """The figures of several runs, a column a run."""
    parts = []
    for title in dict.fromkeys(title for tables in runs.values() for title in tables):
        columns = {name: tables[title] for name, tables in runs.items() if title in tables}
        figures = dict.fromkeys(figure for column in columns.values() for figure in column)
        rows = [(figure, *(column.get(figure) for column in columns.values())) for figure in figures]
        parts.append(f"{title}\n\n" + format_table(("", *columns), rows, style))
    return "\n\n".join(parts)


def _share(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.slide_metrics", description=__doc__.split("\n")[0]
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run folders of rollout.evaluate")
    parser.add_argument("--slides", type=Path, required=True, help="slides.jsonl of the runs' split")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args(argv)
    if not arguments.slides.is_file():
        parser.error(f"there is no file {arguments.slides}")
    slides = read_slides(arguments.slides)
    try:
        figures = {str(run): run_figures(read_run(run, slides)) for run in arguments.runs}
    except ValueError as error:
        parser.error(str(error))
    names = {run.resolve().name for run in arguments.runs}
    if len(names) == len(arguments.runs):
        figures = {Path(run).resolve().name: tables for run, tables in figures.items()}
    print(render(figures))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
