"""Episodes on a retriever that waits for the network: they wait together, and nothing else changes."""

import asyncio
import re
import threading

import pytest

from visor.env.config import EpisodeConfig
from visor.env.prompts import load_prompts
from visor.models.base import Sampling
from visor.retrieval.base import ScoredPage
from visor.systems.config import LoopConfig
from visor.systems.registry import SystemParts, build_system
from visor.systems.visor import VisorSystem
from visor.types import Completion, Page, Question, StopReason, split_page_id

EPISODES = 40
"""More than the threads that the event loop shares."""


class Client:
    name = "scripted"

    async def complete(self, request):
        question = request.messages[1].text.split()[-2]
        searched = sum(bool(message.images) for message in request.messages)
        if searched < 2:
            return Completion(text=f"<think>look again</think><search>{question} {searched}</search>")
        return Completion(text=f"<think>found it</think><answer>{question}</answer>")


class Local:
    name = "pages"

    def __init__(self):
        self.threads = set()

    def search(self, query, k):
        self.threads.add(threading.current_thread())
        number = int(query.split()[0])
        return [ScoredPage(f"d#page={number * 10 + n + 1}", 1.0 / (n + 1)) for n in range(5)][:k]


class Remote(Local):
    """Answers when so many searches are under way at once."""

    blocking = True

    def __init__(self, together=1):
        super().__init__()
        self.barrier = threading.Barrier(together)

    def search(self, query, k):
        self.barrier.wait(20)
        return super().search(query, k)


def solve(retriever, episodes=EPISODES):
    system = VisorSystem(
        Client(),
        retriever,
        lambda page_id: (280, 280),
        EpisodeConfig(prompts="tiny"),
        load_prompts("tiny"),
        Sampling(),
    )

    async def main():
        questions = [Question(question_id=f"q{n}", text=f"what is {n} ?") for n in range(episodes)]
        return await asyncio.gather(*(system.solve(question, seed=3) for question in questions))

    return asyncio.run(main())


def record(trajectory):
    for turn in trajectory.turns:
        turn.retrieval_seconds = 0.0
    trajectory.meta.pop("wall_seconds")
    return trajectory.model_dump_json()


def test_searches_of_concurrent_episodes_overlap():
    trajectories = solve(Remote(together=EPISODES))
    assert [t.answer for t in trajectories] == [str(n) for n in range(EPISODES)]


def test_the_records_are_those_of_a_local_retriever():
    local, remote = Local(), Remote()
    assert [record(t) for t in solve(local)] == [record(t) for t in solve(remote)]
    assert local.threads == {threading.main_thread()}, "an index in memory is asked where the loop runs"
    assert threading.main_thread() not in remote.threads


def test_a_failed_search_is_a_record():
    class Away(Remote):
        def search(self, query, k):
            if query.startswith("1 "):
                raise ConnectionError("gone for good")
            return super().search(query, k)

    good, bad, other = solve(Away(), episodes=3)
    assert (good.answer, other.answer) == ("0", "2")
    assert bad.stop_reason == StopReason.ERROR
    assert (bad.error.source, bad.error.type, bad.error.message) == (
        "environment",
        "ConnectionError",
        "gone for good",
    )


def test_a_run_that_is_cancelled_does_not_wait_for_its_searches():
    release = threading.Event()

    class Stuck(Remote):
        def search(self, query, k):
            release.wait(60)
            return []

    async def main():
        system = VisorSystem(
            Client(),
            Stuck(),
            lambda page_id: (280, 280),
            EpisodeConfig(prompts="tiny"),
            load_prompts("tiny"),
            Sampling(),
        )
        await asyncio.wait_for(system.solve(Question(question_id="q", text="what is 1 ?")), 0.2)

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    assert not release.is_set()
    release.set()


class Store:
    def page(self, page_id):
        doc_id, number = split_page_id(page_id)
        return Page(page_id=page_id, doc_id=doc_id, page_number=number, image="p.png", width=280, height=280)


class ReactClient:
    """Searches twice, then answers, in tags."""

    name = "scripted"

    async def complete(self, request):
        replies = sum(message.role == "assistant" for message in request.messages)
        texts = " ".join(message.text for message in request.messages if message.role == "user")
        number = re.search(r"(\d+) is what", texts).group(1)
        if replies < 2:
            return Completion(text=f"<search>{number} {replies}</search>")
        return Completion(text=f"<answer>{number}</answer>")


@pytest.mark.parametrize("name", ["react", "vanilla"])
def test_searches_of_the_other_systems_overlap_too(name):
    """The barrier breaks, and every question fails, unless all questions search at the same time."""
    count = 12
    parts = SystemParts(
        client=ReactClient(),
        retriever=Remote(together=count),
        store=Store(),
        sampling=Sampling(),
        loop=LoopConfig(),
    )
    system = build_system(name, parts)

    async def main():
        questions = [Question(question_id=f"q{n}", text=f"{n} is what ?") for n in range(count)]
        return await asyncio.gather(*(system.solve(question, seed=3) for question in questions))

    for number, trajectory in enumerate(asyncio.run(main())):
        assert trajectory.error is None
        assert trajectory.turns[0].candidates[0][0] == f"d#page={number * 10 + 1}"
