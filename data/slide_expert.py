"""A scripted expert for the slide world: the teacher of the tiny policy.

It answers through the real episode, as a policy client, and reads the truth of each page it is shown from
`slides.jsonl` instead of its pixels. Everything downstream (records, filters, rows, `sft.train`) treats its
trajectories as those of any teacher. It confirms its answer with one more search only in a small share of
its trajectories, so that stopping well is left to reinforcement learning.

Two other teachers serve experiments: one that searches a fixed number of times whatever it finds, the policy
that reinforcement learning has to beat, and one whose replies are malformed now and then.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

EXTRA_SEARCH_SHARES = (0.88, 0.10, 0.02)
"""Share of trajectories with Δ = 0, 1 and 2 searches after the last gold page."""
SLIDE_EPISODE: dict[str, Any] = {
    "prompts": "tiny",
    "page_min_pixels": 112 * 112,
    "page_max_pixels": 112 * 112,
    "crop_min_pixels": 112 * 112,
    "crop_max_pixels": 112 * 112,
}
"""The slide world's own resolution and prompts; the rest of the episode is as for any corpus."""
MAX_TURNS = EpisodeConfig(**SLIDE_EPISODE).max_turns


def describe(slide: Slide) -> str:
    """The page in words: what the policy learns to write about a page it reads."""
    return f"{slide.name} , " + " , ".join(f"{topic} {value}" for topic, value in slide.facts) + " ."


class SlideExpert:
    """Answers one question. Holds state, so an expert serves a single episode.

    `noise` is the probability of a malformed reply; the next one is then about the same observation.
    """

    name = "slide-expert"

    def __init__(
        self,
        question: Question,
        slides: dict[str, Slide],
        extra_searches: int = 0,
        noise: float = 0.0,
        rng: random.Random | None = None,
    ) -> None:
        self.question = question
        self.slides = slides
        self.extra_searches = extra_searches
        self.noise = noise
        self.rng = rng or random.Random(question.question_id)
        self.wanted, self.subject = parse_question(question)
        self.found: dict[str, int] = {}
        self._meant: Completion | None = None

    async def complete(self, request: Request) -> Completion:
        reply = self._meant or self._solve(request)
        self._meant = None
        if self.noise and self.rng.random() < self.noise:
            self._meant = reply
            return reply.model_copy(update={"text": malformed(reply.text, self.rng)})
        return reply

    def _solve(self, request: Request) -> Completion:
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
        return best_answer(self.wanted, self.found)

    def _reply(self, thought: str, *, search: bool = False, answer: str = "") -> Completion:
        # A space before each word: the words of thoughts, queries and answers are then the same tokens.
        action = f"<search> {self.question.text}</search>" if search else f"<answer> {answer}</answer>"
        return Completion(text=f"<think> {thought}</think>{action}", model=self.name)


class FixedSearcher:
    """Searches `searches` times with the question as the query, whatever it finds, then answers from what it
    has seen. It reads without error, so its reward is the best that stopping at a fixed depth can earn."""

    name = "fixed-searcher"

    def __init__(self, question: Question, slides: dict[str, Slide], searches: int) -> None:
        self.question = question
        self.slides = slides
        self.left = searches
        self.wanted, self.subject = parse_question(question)
        self.found: dict[str, int] = {}

    async def complete(self, request: Request) -> Completion:
        for image in request.messages[-1].images:
            slide = self.slides[image.page_id]
            if slide.name == self.subject:
                self.found |= {topic: value for topic, value in slide.facts if topic in self.wanted}
        if self.left > 0:
            self.left -= 1
            return Completion(
                text=f"<think> search</think><search> {self.question.text}</search>", model=self.name
            )
        known = len(self.found) == len(self.wanted)
        answer = best_answer(self.wanted, self.found) if known else "not found"
        return Completion(
            text=f"<think> the answer is {answer} .</think><answer> {answer}</answer>", model=self.name
        )


MALFORMED = ("no tag", "not closed", "no thinking")


def malformed(text: str, rng: random.Random) -> str:
    """The reply without its action's tags, without the closing one, or without its thinking: each is a reply
    that the environment cannot carry out."""
    thought, _, action = text.partition("</think>")
    kind = rng.choice(MALFORMED)
    if kind == "no thinking":
        return action
    opening, _, rest = action.partition(">")
    body, _, _ = rest.partition("<")
    return f"{thought}</think>{body}" if kind == "no tag" else f"{thought}</think>{opening}>{body}"


def best_answer(wanted: list[str], found: dict[str, int]) -> str:
    """The value of the one topic, or the topic with the larger value."""
    return str(found[wanted[0]]) if len(wanted) == 1 else max(wanted, key=lambda topic: found[topic])


def parse_question(question: Question) -> tuple[list[str], str]:
    """(topics, company) of "profit of amber fox" or "more profit or tax of amber fox"."""
    topics, _, subject = question.text.partition(" of ")
    return topics.removeprefix("more ").split(" or "), subject


@dataclass(frozen=True)
class Teacher:
    """Which teacher writes the trajectories. ValueError for settings that name none."""

    shares: tuple[float, ...] = EXTRA_SEARCH_SHARES
    """Share of trajectories with 0, 1, 2 … searches after the last gold page."""
    noise: float = 0.0
    """Probability of a malformed reply."""
    always_searches: int | None = None
    """Search this often, always, instead."""

    def __post_init__(self) -> None:
        if not all(share >= 0 for share in self.shares) or not sum(self.shares) > 0:
            raise ValueError(f"extra_searches {self.shares}: shares are 0 or more, and not all of them 0")
        if not 0 <= self.noise < 1:
            raise ValueError(f"noise {self.noise} is no probability from 0 to below 1")
        if self.always_searches is not None and not 0 <= self.always_searches < MAX_TURNS:
            raise ValueError(
                f"always_searches {self.always_searches}: an episode has {MAX_TURNS} turns, "
                "the answer among them"
            )
        if self.always_searches is not None and self.noise:
            raise ValueError("the policy that always searches has no noise; give one of the two")

    def policy(self, question: Question, slides: dict[str, Slide], rng: random.Random):
        if self.always_searches is not None:
            return FixedSearcher(question, slides, self.always_searches)
        extra = rng.choices(range(len(self.shares)), self.shares)[0]
        return SlideExpert(question, slides, extra, self.noise, rng)


def expert_trajectories(
    questions: list[Question],
    slides: dict[str, Slide],
    retriever: Retriever,
    corpus: Corpus,
    seed: int = 0,
    teacher: Teacher = Teacher(),
) -> list[Trajectory]:
    """One trajectory a question, in order."""
    rng = random.Random(f"slide-expert-{seed}")
    config = EpisodeConfig(**SLIDE_EPISODE)
    prompts = load_prompts(config.prompts)

    async def solve_all() -> list[Trajectory]:
        done = []
        for question in questions:
            expert = teacher.policy(question, slides, rng)
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
    parser.add_argument(
        "--extra_searches",
        type=float,
        nargs="+",
        default=list(EXTRA_SEARCH_SHARES),
        metavar="SHARE",
        help="shares of trajectories with 0, 1, 2 … searches after the last gold page (default: %(default)s)",
    )
    parser.add_argument("--noise", type=float, default=0.0, help="probability of a malformed reply")
    parser.add_argument(
        "--always_searches", type=int, help="search this often whatever is found, then answer"
    )
    arguments = parser.parse_args()
    try:
        trajectories = write_trajectories(arguments)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    turns = sum(len(trajectory.turns) for trajectory in trajectories)
    print(f"{len(trajectories)} trajectories, {turns} turns → {arguments.output}")


def write_trajectories(arguments: argparse.Namespace) -> list[Trajectory]:
    """What the command does; ValueError for settings or files that do not go together."""
    teacher = Teacher(tuple(arguments.extra_searches), arguments.noise, arguments.always_searches)
    corpus = Corpus.open(arguments.corpus)
    slides = read_slides(arguments.slides)
    unknown = [page.page_id for page in corpus.pages() if page.page_id not in slides]
    if unknown:
        raise ValueError(f"{arguments.slides} lacks pages of {arguments.corpus}, such as {unknown[0]}")
    retriever = open_index(arguments.index or arguments.corpus / "index" / "bm25", corpus)
    questions = load_questions(arguments.questions)
    random.Random(f"order-{arguments.seed}").shuffle(questions)
    questions = questions[: arguments.limit]
    trajectories = expert_trajectories(questions, slides, retriever, corpus, arguments.seed, teacher)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with arguments.output.open("w") as file:
        file.writelines(trajectory.model_dump_json() + "\n" for trajectory in trajectories)
    return trajectories


if __name__ == "__main__":
    main()
