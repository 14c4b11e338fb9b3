"""Which distilled trajectories are good enough to learn from (VISOR appendix B, data filtering).

python -m sft.filter trajectories.jsonl --questions questions:train.jsonl -o filtered.jsonl
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rewards.combine import score
from rewards.judge import Judge
from rewards.retrieval import retrieval_outcome
from rollout.build import make_judge
from rollout.recorder import rewrite
from rollout.trajectory_file import read_trajectories, refuse_own_input
from sft.command import explained, questions_of
from visor.config import Config
from visor.types import Crop, Invalid, ObservationKind, Question, Search, Trajectory, Turn


class FilterSettings(Config):
    max_retrievals: int = 10
    """More search turns than this are too many."""
    max_extra_searches: int = 1
    """Searches after the last gold page was shown. The paper names redundant searches without a number."""
    max_uninformative_searches: int = 2
    """Searches before that which showed no gold page; as above, the number is ours."""
    keep_invalid_actions: bool = False
    """Keep trajectories with a reply that could not be carried out."""


@dataclass
class FilterReport:
    """A trajectory that fails several filters counts under each in `failing`, under one in `removed`."""

    read: int = 0
    kept: int = 0
    removed: Counter = field(default_factory=Counter)
    failing: Counter = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [f"{self.kept} of {self.read} trajectories kept"]
        lines += [
            f"  {n:6d} {name} (failed by {self.failing[name]})" for name, n in self.removed.most_common()
        ]
        return "\n".join(lines)


def filter_trajectories(
    trajectories: Iterable[Trajectory],
    questions: Mapping[str, Question],
    settings: FilterSettings | None = None,
) -> tuple[list[Trajectory], FilterReport]:
    """Keep the trajectories that pass every filter; `questions` gives their gold pages by id. Pure."""
    settings = settings or FilterSettings()
    report, kept = FilterReport(), []
    for trajectory in trajectories:
        report.read += 1
        reasons = defects(trajectory, questions[trajectory.question_id].gold_page_ids, settings)
        report.failing.update(reasons)
        if reasons:
            report.removed[reasons[0]] += 1
        else:
            kept.append(trajectory)
    report.kept = len(kept)
    return kept, report


def defects(trajectory: Trajectory, gold_page_ids: Sequence[str], settings: FilterSettings) -> list[str]:
    """The filters a trajectory fails, in the order of the paper; empty when it is good.

    Its reward must have been computed: the verdict on the answer is read from there.
    """
    outcome = retrieval_outcome(trajectory, gold_page_ids)
    turns = trajectory.turns
    verdict = trajectory.reward.verdict if trajectory.reward else None
    failed = {
        "failed or unanswered": trajectory.error is not None or not trajectory.answer,
        "box not after a retrieval": any(_box_without_page(turns, i) for i in range(len(turns))),
        "full-image box": any(_covers_all(turn) for turn in turns),
        "incomplete retrieval": outcome.complete_at is None,
        "too many retrievals": outcome.searches > settings.max_retrievals,
        "wrong answer": verdict is False,
        "answer not judged": verdict is None,
        "redundant searches": (outcome.delta or 0) > settings.max_extra_searches or _searched_in_vain(turns),
        "uninformative searches": _misses(turns, set(gold_page_ids)) > settings.max_uninformative_searches,
        "invalid action": not settings.keep_invalid_actions and any(_is_defective(turn) for turn in turns),
    }
    return [name for name, fails in failed.items() if fails]


def _box_without_page(turns: Sequence[Turn], index: int) -> bool:
    """A box, carried out or refused, whose previous turn did not bring a page."""
    action = turns[index].action
    if not (isinstance(action, Crop) or (isinstance(action, Invalid) and "<bbox>" in action.raw)):
        return False
    before = turns[index - 1].observation if index else None
    return before is None or before.kind != ObservationKind.PAGE


def _covers_all(turn: Turn) -> bool:
    """A box over the whole page: [0,0,1000,1000], or the whole picture in pixels."""
    if not isinstance(turn.action, Crop):
        return False
    width, height = 1000, 1000
    if turn.action.space == "pixels":
        sizes = turn.completion.image_sizes
        if not sizes:
            return False
        width, height = sizes[-1]
    x1, y1, x2, y2 = turn.action.box
    return min(x1, x2) <= 0 and min(y1, y2) <= 0 and max(x1, x2) >= width and max(y1, y2) >= height


def _searched_in_vain(turns: Sequence[Turn]) -> bool:
    return any(turn.observation and turn.observation.kind == ObservationKind.NO_NEW_PAGE for turn in turns)


def _misses(turns: Sequence[Turn], gold: set[str]) -> int:
    """Searches that showed another page while a gold page was still missing."""
    missing, misses = set(gold), 0
    for turn in turns:
        if missing and isinstance(turn.action, Search) and turn.observation:
            misses += not missing.intersection(turn.observation.page_ids)
            missing.difference_update(turn.observation.page_ids)
    return misses


def _is_defective(turn: Turn) -> bool:
    return isinstance(turn.action, Invalid) or not turn.format_ok


def score_missing(
    trajectories: Iterable[Trajectory], questions: Mapping[str, Question], judge: Judge
) -> None:
    """Score the trajectories that have no reward yet."""
    for trajectory in trajectories:
        if trajectory.reward is None and trajectory.error is None:
            trajectory.reward = score(trajectory, questions[trajectory.question_id], judge)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m sft.filter", description="Filter distilled trajectories."
    )
    parser.add_argument("input", type=Path, help="JSON lines of trajectories, or a run folder")
    parser.add_argument("--questions", required=True, help="their questions as reader:PATH")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument(
        "--judge", default="rule", help="judge of trajectories without a reward (default rule)"
    )
    defaults = FilterSettings()
    for name in ("max_retrievals", "max_extra_searches", "max_uninformative_searches"):
        parser.add_argument(f"--{name}", type=int, default=getattr(defaults, name))
    parser.add_argument("--keep_invalid_actions", action="store_true")
    arguments = parser.parse_args(argv)
    settings = FilterSettings(**{name: getattr(arguments, name) for name in FilterSettings.model_fields})
    with explained("sft.filter"):
        report = _filter_file(arguments, settings)
    print(report)
    if not report.kept:
        print(f"sft.filter: no trajectory was kept; {arguments.output} is empty", file=sys.stderr)
        raise SystemExit(1)


def _filter_file(arguments: argparse.Namespace, settings: FilterSettings) -> FilterReport:
    refuse_own_input(arguments.input, arguments.output)
    trajectories = list(read_trajectories(arguments.input))
    questions = questions_of(trajectories, arguments.questions)
    score_missing(trajectories, questions, make_judge(arguments.judge))
    kept, report = filter_trajectories(trajectories, questions, settings)
    rewrite(arguments.output, [trajectory.model_dump(mode="json") for trajectory in kept])
    return report


if __name__ == "__main__":
    main()
