"""The two edits of VISOR appendix B: the question as every query, and a verification round at the end.

An edited trajectory is played again through the episode, page by page as recorded, so that every context and
observation is the one the environment gives for the edited replies.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import Field

from data.corpus import Corpus
from rewards.combine import ascore
from rewards.judge import Judge
from rollout.build import make_judge
from rollout.recorder import Recorder
from rollout.trajectory_file import read_trajectories, refuse_own_input
from sft.command import explained, questions_of
from sft.distill import append_context
from visor.config import Config, parse_cli
from visor.env.actions import parse_response
from visor.env.config import EpisodeConfig
from visor.env.crop import ImageCutter
from visor.env.episode import Episode
from visor.env.prompts import PromptSet, load_prompts
from visor.env.verification import is_verification
from visor.models.base import PolicyClient, Request, Sampling
from visor.models.loading import make_client
from visor.retrieval.base import ScoredPage
from visor.types import (
    Completion,
    PageStore,
    Question,
    Search,
    Trajectory,
    derive_seed,
    page_sort_key,
    split_page_id,
)

STATEMENT = "I have the answer and want to verify it with one more search."
_QUERY = re.compile(r"<search>.*?</search>", re.DOTALL)
_ANSWER = re.compile(r"<answer>.*?</answer>", re.DOTALL)


class CannotAugment(ValueError):
    """The trajectory does not lend itself to the edit; the message is the reason it is counted under."""


@dataclass
class _Recorded:
    """Gives one page, whatever the query: the recorded one of the turn being played."""

    name: str = "recorded"
    page_id: str = ""

    def search(self, query: str, k: int) -> list[ScoredPage]:
        return [ScoredPage(self.page_id, 1.0)]


@dataclass
class AugmentReport:
    read: int = 0
    kept: int = 0
    left_out: Counter = field(default_factory=Counter)
    """Reason → trajectories."""

    def __str__(self) -> str:
        lines = [f"{self.kept} of {self.read} trajectories augmented"]
        return "\n".join(lines + [f"  {n:6d} {reason}" for reason, n in self.left_out.most_common()])


class Augmenter:
    """Edits trajectories one at a time; `teacher` writes the thought about the page of the added round."""

    def __init__(
        self,
        teacher: PolicyClient,
        store: PageStore,
        config: EpisodeConfig,
        prompts: PromptSet,
        *,
        statement: str = STATEMENT,
        sampling: Sampling | None = None,
        seed: int = 0,
    ) -> None:
        if not is_verification(statement):
            raise ValueError(f"the statement {statement!r} is not recognised as one of verification")
        self.teacher = teacher
        self.store = store
        self.config = config
        self.prompts = prompts
        self.statement = statement
        self.sampling = sampling or Sampling(temperature=0.7)
        self.seed = seed

    async def augment(self, trajectory: Trajectory, question: Question) -> Trajectory:
        """Return the edited trajectory, unscored. CannotAugment, saying why, when it cannot be edited.

        A trajectory that ends with a verification search of its own gets no second one.
        """
        if not trajectory.turns or trajectory.answer is None:
            raise CannotAugment("no answer")
        verified = any(turn.is_verification for turn in trajectory.turns)
        if not verified and len(trajectory.turns) + 1 > self.config.max_turns:
            raise CannotAugment("no turn left for a verification round")
        retriever = _Recorded()
        episode = Episode(
            question, retriever, self.config, self.prompts, self.store,
            seed=trajectory.seed, sample_index=trajectory.sample_index, system=trajectory.system,
        )  # fmt: skip
        for turn in trajectory.turns[:-1]:
            if isinstance(turn.action, Search):
                if not (turn.observation and turn.observation.page_ids):
                    raise CannotAugment("a search that found nothing")
                retriever.page_id = turn.observation.page_ids[0]
            _play(episode, query_replaced(turn.completion.text, question.text))
        last = trajectory.turns[-1].completion.text
        if not verified:
            retriever.page_id = self._unseen_page(trajectory)
            _play(episode, verification_reply(last, self.statement, question.text))
            last = await self._verified_reply(episode, last, trajectory)
        _play(episode, last)
        edited = episode.trajectory()
        if edited.answer != trajectory.answer:
            raise CannotAugment("the replayed answer is another one")
        edited.meta.update({"augmented": True, "model": trajectory.meta.get("model")})
        return edited

    def _unseen_page(self, trajectory: Trajectory) -> str:
        """A page of the document shown last that was not shown, chosen by seed, question and sample."""
        shown = trajectory.shown_page_ids
        if not shown:
            raise CannotAugment("no page shown")
        document, _ = split_page_id(shown[-1])
        unseen = [p.page_id for p in self.store.pages() if p.doc_id == document and p.page_id not in shown]
        if not unseen:
            raise CannotAugment("every page of the document was shown")
        seed = derive_seed(self.seed, "verification page", trajectory.question_id, trajectory.sample_index)
        return random.Random(seed).choice(sorted(unseen, key=page_sort_key))

    async def _verified_reply(self, episode: Episode, last: str, trajectory: Trajectory) -> str:
        """The teacher's thought about the new page, followed by the original answer."""
        seed = derive_seed(self.seed, "verification", trajectory.question_id, trajectory.sample_index)
        request = Request(episode.context(), seed, self.sampling)
        reply = await self.teacher.complete(request)
        think = parse_response(reply.text, self.config.box_space).think.strip()
        if not think:
            raise CannotAugment("the teacher gave no thought about the new page")
        answer = _ANSWER.search(last)
        assert answer is not None, "the last reply was parsed as an answer"
        return f"<think>{think}</think>\n{answer[0]}"


def query_replaced(text: str, question: str) -> str:
    """A reply whose search, if it is one, asks for the question itself."""
    closed = text.rfind("</think>")
    head, tail = (text[: closed + 8], text[closed + 8 :]) if closed >= 0 else ("", text)
    return head + _QUERY.sub(lambda _: f"<search>{question}</search>", tail, count=1)


def verification_reply(text: str, statement: str, question: str) -> str:
    """The last reply with the statement at the end of its thought and a search in place of its answer."""
    think, closed, _ = text.partition("</think>")
    if not closed:
        raise CannotAugment("the last reply has no thought")
    return f"{think.rstrip()} {statement}</think>\n<search>{question}</search>"


def _play(episode: Episode, text: str) -> None:
    if episode.done:
        raise CannotAugment("the edited replies end early")
    episode.step(Completion(text=text))


async def augment_all(
    augmenter: Augmenter,
    trajectories: Sequence[Trajectory],
    questions: dict[str, Question],
    judge: Judge,
    recorder: Recorder,
    max_concurrency: int = 16,
) -> AugmentReport:
    """Augment, score and record every trajectory that is not in the recorder yet.

    What goes wrong with one trajectory (an outage of the teacher, a context too long for it) is printed and
    counted in `left_out` under the type of the fault; the others go on, and the next run tries it again.
    """
    report, slots = AugmentReport(), asyncio.Semaphore(max_concurrency)

    async def one(trajectory: Trajectory) -> None:
        question = questions[trajectory.question_id]
        async with slots:
            try:
                edited = await augmenter.augment(trajectory, question)
            except CannotAugment as reason:
                report.left_out[str(reason)] += 1
                return
            except Exception as fault:
                kind = type(fault).__name__
                report.left_out[f"fault: {kind}"] += 1
                name = f"{trajectory.question_id}/{trajectory.sample_index}"
                print(f"{name}: {kind}: {fault}", file=sys.stderr)
                return
        edited.reward = await ascore(edited, question, judge)
        recorder.append(edited)
        report.kept += 1

    missing = [t for t in trajectories if (t.question_id, t.sample_index) not in recorder.done]
    report.read = len(missing)
    async with asyncio.TaskGroup() as group:
        for trajectory in missing:
            group.create_task(one(trajectory))
    return report


class AugmentConfig(Config):
    input: str
    """JSON lines of filtered trajectories, or a run folder."""
    output: str
    """JSON lines of augmented ones; existing ones are kept and not made again."""
    questions: str
    """Their questions as reader:PATH."""
    corpus: str
    model: str
    """The teacher: openai:NAME@URL, hf:PATH, …"""
    episode: EpisodeConfig = Field(default_factory=append_context)
    """Context in which the edited trajectories are played; as in distillation, or as in inference."""
    judge: str = "rule"
    statement: str = STATEMENT
    """What the thought before the added search ends with."""
    temperature: float = Field(0.7, ge=0)
    max_new_tokens: int = Field(2048, ge=1)
    seed: int = 0
    max_concurrency: int = Field(16, ge=1)


def augment_file(config: AugmentConfig, teacher: PolicyClient | None = None) -> AugmentReport:
    """Augment the trajectories of a file; `teacher` stands in for the configured model."""
    refuse_own_input(config.input, config.output)
    trajectories = list(read_trajectories(config.input))
    corpus = Corpus.open(config.corpus)
    corpus.check_images()
    images = ImageCutter(corpus)
    augmenter = Augmenter(
        teacher or make_client(config.model, images=images),
        corpus,
        config.episode,
        load_prompts(config.episode.prompts),
        statement=config.statement,
        sampling=Sampling(config.temperature, 1.0, config.max_new_tokens),
        seed=config.seed,
    )
    questions = questions_of(trajectories, config.questions, corpus)
    judge = make_judge(config.judge, images)
    with Recorder(config.output) as recorder:
        return asyncio.run(
            augment_all(augmenter, trajectories, questions, judge, recorder, config.max_concurrency)
        )


def main(argv: Sequence[str] | None = None) -> None:
    config = parse_cli(AugmentConfig, argv, prog="sft.augment", description="Augment filtered trajectories.")
    with explained("sft.augment"):
        print(augment_file(config))


if __name__ == "__main__":
    main()
