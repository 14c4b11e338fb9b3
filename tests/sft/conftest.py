import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "grpo"))

from training_world import EPISODE, write_world

from visor.env.config import EpisodeConfig


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_world(folder)
    return folder


@pytest.fixture(scope="session")
def play(world):
    """Plays given replies to question number `number` (1-4) and returns the scored trajectory."""
    import asyncio

    from data.corpus import Corpus
    from data.questions import load_questions
    from rewards.combine import score
    from rewards.judge import RuleJudge
    from visor.env.prompts import load_prompts
    from visor.models.base import Sampling
    from visor.retrieval.index import open_index
    from visor.systems.visor import VisorSystem
    from visor.types import Completion

    corpus = Corpus.open(world / "corpus")
    retriever = open_index(world / "corpus" / "index" / "bm25", corpus)
    questions = load_questions(f"questions:{world / 'questions.jsonl'}", corpus)

    class Actor:
        name = "actor"

        def __init__(self, replies):
            self.replies = list(replies)

        async def complete(self, request):
            return Completion(text=self.replies.pop(0))

    def run(replies, number=1, sample_index=0, **episode):
        config = EpisodeConfig(
            **{**EPISODE, "max_turns": 8, "window": None, "evidence_space": False, **episode}
        )
        system = VisorSystem(Actor(replies), retriever, corpus, config, load_prompts("tiny"), Sampling())
        question = questions[number - 1]
        trajectory = asyncio.run(system.solve(question, sample_index=sample_index))
        assert trajectory.error is None, trajectory.error
        trajectory.reward = score(trajectory, question, RuleJudge())
        return trajectory

    run.questions = {question.question_id: question for question in questions}
    run.corpus = corpus
    return run
