"""A scripted world for episode tests: pages without pictures, a retriever with fixed rankings."""

import json
from pathlib import Path

import pytest

from visor.env.config import EpisodeConfig
from visor.env.episode import Episode
from visor.env.prompts import load_prompts
from visor.retrieval.base import ScoredPage
from visor.types import Completion, Question

PAGE = (1008, 2016)
VISOR = load_prompts("visor")
TINY = load_prompts("tiny")


def case_file(name: str) -> Path:
    path = Path(__file__).parents[4] / "shared" / "cases" / "files" / name
    if not path.is_file():
        pytest.skip(f"case file {name} is not on this machine")
    return path


def case_lines(name: str) -> list[dict]:
    return [json.loads(line) for line in case_file(name).read_text(encoding="utf-8").splitlines()]


class Ranking:
    """Answers every query with the same pages, best first."""

    name = "ranking"

    def __init__(self, page_ids: list[str]) -> None:
        self.page_ids = page_ids
        self.calls: list[tuple[str, int]] = []

    def search(self, query: str, k: int) -> list[ScoredPage]:
        self.calls.append((query, k))
        return [ScoredPage(page_id, 1.0 / (i + 1)) for i, page_id in enumerate(self.page_ids[:k])]


class Broken:
    name = "broken"

    def search(self, query: str, k: int) -> list[ScoredPage]:
        raise ConnectionError("the index is gone")


def pages(n: int) -> list[str]:
    return [f"d#page={i}" for i in range(1, n + 1)]


def make_episode(
    retriever=None, *, question="How many ships are there?", prompts=VISOR, policy=None, **config
):
    return Episode(
        Question(question_id="q1", text=question),
        retriever or Ranking(pages(20)),
        EpisodeConfig(**config),
        prompts,
        lambda page_id: PAGE,
        evidence_policy=policy,
    )


def say(think: str, tag: str, content: str) -> Completion:
    return Completion(text=f"<think>{think}</think>\n<{tag}>{content}</{tag}>")


def search(think: str = "I need a page", query: str = "ships") -> Completion:
    return say(think, "search", query)


def crop(think: str = "too small to read", box: str = "[100,100,500,500]") -> Completion:
    return say(think, "bbox", box)


def answer(text: str = "12", think: str = "enough is known") -> Completion:
    return say(think, "answer", text)


def junk() -> Completion:
    return Completion(text="<think>I am not sure what to do</think> hm")


def play(episode: Episode, replies: list[Completion]) -> Episode:
    for reply in replies:
        if episode.done:
            break
        episode.step(reply)
    return episode


def texts(messages) -> str:
    return "\n".join(message.text for message in messages)
