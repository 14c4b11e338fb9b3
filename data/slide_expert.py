"""A scripted expert for the slide world: the teacher of the tiny policy.

It answers through the real episode, as a policy client, and reads the truth of each page it is shown from
`slides.jsonl` instead of its pixels. Everything downstream (records, filters, rows, `sft.train`) treats its
trajectories as those of any teacher. It confirms its answer with one more search only in a small share of
its trajectories, so that stopping well is left to reinforcement learning.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from pathlib import Path

from data.corpus import Corpus
from data.questions import load_questions
from data.slide_world import Slide, read_slides
from visor.env.config import EpisodeConfig
from visor.env.prompts import load_prompts
from visor.models.base import Request, Sampling
from visor.retrieval.base import Retriever
from visor.retrieval.index import open_index
from visor.systems.visor import VisorSystem
from visor.types import Completion, Question, Trajectory

EXTRA_SEARCH_SHARES = (0.75, 0.22, 0.03)
"""Share of trajectories with Δ = 0, 1 and 2 searches after the last gold page."""
SLIDE_EPISODE = {
    "prompts": "tiny",
    "page_min_pixels": 112 * 112,
    "page_max_pixels": 112 * 112,
    "crop_min_pixels": 112 * 112,
    "crop_max_pixels": 112 * 112,
}
"""The slide world's own resolution and prompts; the rest of the episode is as for any corpus."""


def describe(slide: Slide) -> str:
    """The page in words: what the policy learns to write about a page it reads."""
    return f"{slide.name} , " + " , ".join(f"{topic} {value}" for topic, value in slide.facts) + " ."


class SlideExpert:
    """Answers one question. Holds state, so an expert serves a single episode."""

    name = "slide-expert"

    def __init__(self, question: Question, slides: dict[str, Slide], extra_searches: int = 0) -> None:
        self.question = question
        self.slides = slides
        self.extra_searches = extra_searches
        self.wanted, self.subject = parse_question(question)
        self.found: dict[str, int] = {}

    async def complete(self, request: Request) -> Completion:
        images = request.messages[-1].images
        if not images:
            if len(request.messages) == 2:
                return self._reply("search", search=True)
            known = len(self.found) == len(self.wanted)
            return self._reply("no new page", answer=self._answer() if known else "not found")
        slide = self.slides[images[-1].page_id]
        was_complete = len(self.found) == len(self.wanted)
        if slide.name == self.subject:
            self.found |= {topic: value for topic, value in slide.facts if topic in self.wanted}
        thought = [describe(slide), *(["confirmed ."] if was_complete else []), *self._so_far()]
        if len(self.found) < len(self.wanted):
            missing = next(topic for topic in self.wanted if topic not in self.found)
            return self._reply(" ".join([*thought, f"{missing} not found ."]), search=True)
        answer = self._answer()
        thought.append(f"the answer is {answer} .")
        if self.extra_searches > 0:
            self.extra_searches -= 1
            return self._reply(" ".join([*thought, "verify it"]), search=True)
        return self._reply(" ".join(thought), answer=answer)

    def _so_far(self) -> list[str]:
        """The values found so far, each after its topic."""
        return [f"{topic} {self.found[topic]} ." for topic in self.wanted if topic in self.found]

    def _answer(self) -> str:
        if len(self.wanted) == 1:
            return str(self.found[self.wanted[0]])
        return max(self.wanted, key=lambda topic: self.found[topic])

    def _reply(self, thought: str, *, search: bool = False, answer: str = "") -> Completion:
        # A space before each word: the words of thoughts, queries and answers are then the same tokens.
        action = f"<search> {self.question.text}</search>" if search else f"<answer> {answer}</answer>"
        return Completion(text=f"<think> {thought}</think>{action}", model=self.name)


def parse_question(question: Question) -> tuple[list[str], str]:
    """(topics, company) of "profit of amber fox" or "more profit or tax of amber fox"."""
    topics, _, subject = question.text.partition(" of ")
    return topics.removeprefix("more ").split(" or "), subject


def expert_trajectories(
    questions: list[Question], slides: dict[str, Slide], retriever: Retriever, corpus: Corpus, seed: int = 0
) -> list[Trajectory]:
    """One trajectory a question, in order; the number of extra searches is drawn from EXTRA_SEARCH_SHARES."""
    rng = random.Random(f"slide-expert-{seed}")
    config = EpisodeConfig(**SLIDE_EPISODE)
    prompts = load_prompts(config.prompts)

    async def solve_all() -> list[Trajectory]:
        done = []
        for question in questions:
            extra = rng.choices(range(len(EXTRA_SEARCH_SHARES)), EXTRA_SEARCH_SHARES)[0]
            expert = SlideExpert(question, slides, extra)
            system = VisorSystem(expert, retriever, corpus, config, prompts, Sampling(temperature=0.0))
            done.append(await system.solve(question, seed=seed))
        return done

    return asyncio.run(solve_all())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m data.slide_expert", description="Write expert trajectories of the slide world."
    )
    parser.add_argument("--questions", required=True, help="questions:PATH")
    parser.add_argument("--slides", type=Path, required=True, help="slides.jsonl of the same split")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--index", type=Path, help="default: CORPUS/index/bm25")
    parser.add_argument("-o", "--output", type=Path, required=True, help="trajectories.jsonl")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    corpus = Corpus.open(arguments.corpus)
    retriever = open_index(arguments.index or arguments.corpus / "index" / "bm25", corpus)
    questions = load_questions(arguments.questions)
    random.Random(f"order-{arguments.seed}").shuffle(questions)
    trajectories = expert_trajectories(
        questions[: arguments.limit], read_slides(arguments.slides), retriever, corpus, arguments.seed
    )
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with arguments.output.open("w") as file:
        file.writelines(trajectory.model_dump_json() + "\n" for trajectory in trajectories)
    turns = sum(len(trajectory.turns) for trajectory in trajectories)
    print(f"{len(trajectories)} trajectories, {turns} turns → {arguments.output}")


if __name__ == "__main__":
    main()
