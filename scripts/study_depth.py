"""How deep the gold page lies (t*), and the fixed policy that the study's policies are held against."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from rewards.combine import score
from rewards.judge import RuleJudge
from rollout.recorder import read_lines
from rollout.results import result_row
from scripts.slide_metrics import Episode
from visor.retrieval.base import Retriever
from visor.types import Question, Trajectory

TOP_K = 10
"""Candidates of a search in an episode."""
DEPTHS = ("1", "2", "3", "≥4", "not listed")


def depth(question: Question, retriever: Retriever, top_k: int = TOP_K) -> int | None:
    """t*: the rank of the last gold page in the list for the question's text, which is the number of searches
    that show all gold pages to a policy that repeats that query; None = not among the candidates."""
    ranked = [hit.page_id for hit in retriever.search(question.text, top_k)]
    if not question.gold_page_ids or not set(question.gold_page_ids) <= set(ranked):
        return None
    return 1 + max(ranked.index(page) for page in question.gold_page_ids)


def depth_class(searches: int | None) -> str:
    """The class of DEPTHS that a t* falls in."""
    if searches is None:
        return DEPTHS[-1]
    return str(searches) if searches < 4 else "≥4"


def fixed_episodes(path: Path, questions: Mapping[str, Question], asked: Iterable[str]) -> list[Episode]:
    """The fixed policy's trajectories, scored here, of the questions asked. Its pages come from the truth, so
    what it says about them is not counted."""
    wanted, judge, episodes = set(asked), RuleJudge(), []
    for record in read_lines(path):
        trajectory = Trajectory.model_validate(record)
        if trajectory.question_id not in wanted:
            continue
        question = questions[trajectory.question_id]
        trajectory.reward = score(trajectory, question, judge)
        episodes.append(Episode(result_row(trajectory, question), [], []))
    return episodes
