"""Searches of episodes that wait at the same time: one batch, the same pages, faults kept apart."""

import asyncio
import threading

import pytest

from data.corpus_files import DocumentRecord, write_corpus
from visor.env.config import EpisodeConfig
from visor.env.prompts import load_prompts
from visor.models.base import Sampling
from visor.retrieval.base import ScoredPage
from visor.retrieval.bm25 import BM25Retriever
from visor.retrieval.client import RetrievalClient
from visor.retrieval.index import build_index, default_index_path
from visor.retrieval.service.process import ServiceProcess
from visor.systems.searching import SearchBatcher
from visor.systems.visor import VisorSystem
from visor.types import Completion, Page, Question, StopReason

WORDS = ["apple", "brick", "cloud", "delta", "ember", "fjord"]
TOO_LONG = "apple " * 4000
"""More characters than the service takes in a query."""


def pages():
    texts = [f"{word} {other} {n}" for n, word in enumerate(WORDS) for other in WORDS[n:]]
    return [
        Page(
            page_id=f"d#page={n}", doc_id="d", page_number=n, image="p.png", width=280, height=280, text=text
        )
        for n, text in enumerate(texts, 1)
    ]


class Counting:
    """A retriever that notes which searches came together."""

    def __init__(self, retriever):
        self.retriever = retriever
        self.name = retriever.name
        self.blocking = getattr(retriever, "blocking", False)
        self.batches = []

    def search(self, query, k):
        self.batches.append([query])
        return self.retriever.search(query, k)

    def search_batch(self, queries):
        self.batches.append([query.text for query in queries])
        return self.retriever.search_batch(queries)


@pytest.fixture(scope="module")
def bm25():
    return BM25Retriever.build(pages())


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    from data.corpus import Corpus

    folder = tmp_path_factory.mktemp("served") / "corpus"
    folder.mkdir()
    by_id = {page.page_id: page for page in pages()}
    write_corpus(folder, {"d": DocumentRecord(doc_id="d", status="done", page_count=len(by_id))}, by_id)
    build_index(Corpus.open(folder), default_index_path(folder))
    with ServiceProcess(folder) as process:
        yield process


def asked_together(retriever, searches, **options):
    """The outcomes of concurrent searches, exceptions included."""

    async def main():
        batcher = SearchBatcher(retriever, **options)
        return await asyncio.gather(*(batcher.search(*search) for search in searches), return_exceptions=True)

    return asyncio.run(main())


SEARCHES = [(f"{word} {n}", 1 + n) for n, word in enumerate(WORDS)] + [("", 3), ("apple \ud83d", 3)]


def test_a_batch_has_the_pages_of_single_searches(bm25):
    counting = Counting(bm25)
    found = asked_together(counting, SEARCHES)
    assert found == [bm25.search(*search) for search in SEARCHES]
    assert [len(batch) for batch in counting.batches] == [len(SEARCHES)]


def test_over_http_a_batch_is_one_request(bm25, service):
    with RetrievalClient(service.url) as client:
        counting = Counting(client)
        requests = []
        request = client._session.request
        client._session.request = lambda *args, **kwargs: requests.append(args) or request(*args, **kwargs)
        assert asked_together(counting, SEARCHES) == [bm25.search(*search) for search in SEARCHES]
        assert len(counting.batches) == len(requests) == 1


def test_a_bad_query_fails_alone(bm25, service):
    """The service refuses a request with a query that is too long; an index in memory knows no such limit."""
    searches = [("brick 1", 3), (TOO_LONG, 3), ("cloud 2", 3), ("delta", -1)]
    with RetrievalClient(service.url, budget=5) as client:
        good, refused, also_good, negative = asked_together(client, searches)
    assert (good, also_good) == (bm25.search("brick 1", 3), bm25.search("cloud 2", 3))
    assert refused.status == 413
    assert isinstance(negative, ValueError)


def test_a_service_that_is_away_is_asked_once_for_all():
    class Away:
        name, blocking, asked = "away", True, 0

        def search_batch(self, queries):
            self.asked += 1
            raise ConnectionError("nobody there")

    away = Away()
    assert [str(error) for error in asked_together(away, SEARCHES)] == ["nobody there"] * len(SEARCHES)
    assert away.asked == 1


def test_equal_searches_are_asked_once_and_batches_are_bounded(bm25):
    counting = Counting(bm25)
    searches = [("apple", 3), ("brick", 3), ("apple", 3), ("apple", 2), ("cloud", 3)]
    found = asked_together(counting, searches, batch_size=4)
    assert found == [bm25.search(*search) for search in searches]
    assert counting.batches == [["apple", "brick", "apple"], ["cloud"]]
    found[0].clear()
    assert found[2], "each caller has a list of its own"


def test_a_search_waits_for_no_earlier_batch():
    release = threading.Event()

    class Remote:
        name, blocking = "remote", True

        def search(self, query, k):
            if query == "slow":
                release.wait(20)
            return [ScoredPage("d#page=1", 1.0)]

        def search_batch(self, queries):
            return [self.search(query.text, query.k) for query in queries]

    async def main():
        batcher = SearchBatcher(Remote())
        slow = asyncio.create_task(batcher.search("slow", 1))
        await asyncio.sleep(0.05)
        async with asyncio.timeout(10):
            assert await batcher.search("fast", 1)
        assert not slow.done()
        release.set()
        return await slow

    assert asyncio.run(main()) == [ScoredPage("d#page=1", 1.0)]


def test_one_batcher_serves_several_event_loops(bm25):
    batcher = SearchBatcher(bm25)
    for word in WORDS:
        assert asyncio.run(batcher.search(word, 3)) == bm25.search(word, 3)


# ---------------------------------------------------------------- episodes


class Policy:
    """Answers the requests of all running episodes at once, as a batched model does: two searches, then the
    answer. Question n asks for word n; a bad one asks for too much."""

    name = "scripted"

    def __init__(self, episodes):
        self.episodes, self.waiting = episodes, []

    async def complete(self, request):
        future = asyncio.get_running_loop().create_future()
        self.waiting.append((request, future))
        if len(self.waiting) == self.episodes:
            waiting, self.waiting = self.waiting, []
            for request, future in waiting:
                future.set_result(Completion(text=self.reply(request)))
        return await future

    def reply(self, request):
        word = request.messages[1].text.split()[-2]
        pictures = sum(bool(message.images) for message in request.messages)
        query = TOO_LONG if word == "bad" else f"{word} {pictures}"
        self.episodes -= word == "bad" or pictures == 2  # those ask no more
        if pictures == 2:
            return f"<think>found it</think><answer>{word}</answer>"
        return f"<think>look again</think><search>{query}</search>"


def solve(retriever, words):
    system = VisorSystem(
        Policy(len(words)),
        retriever,
        lambda page_id: (280, 280),
        EpisodeConfig(prompts="tiny"),
        load_prompts("tiny"),
        Sampling(),
    )

    async def main():
        questions = [Question(question_id=f"q{n}", text=f"what is {word} ?") for n, word in enumerate(words)]
        return await asyncio.gather(*(system.solve(question, seed=3) for question in questions))

    return asyncio.run(main())


def test_the_searches_of_a_step_are_one_batch(bm25):
    counting = Counting(bm25)
    trajectories = solve(counting, WORDS)
    assert [t.answer for t in trajectories] == WORDS
    assert [sorted(batch) for batch in counting.batches] == [
        [f"{word} {turn}" for word in WORDS] for turn in (0, 1)
    ]
    for word, trajectory in zip(WORDS, trajectories):
        for number, turn in enumerate(trajectory.turns[:2]):
            expected = bm25.search(f"{word} {number}", 10)
            assert turn.candidates == [(hit.page_id, hit.score) for hit in expected]
            assert turn.retrieval_seconds > 0


def test_an_episode_with_a_bad_query_is_a_record_and_the_others_go_on(service):
    with RetrievalClient(service.url, budget=5) as client:
        trajectories = solve(client, [*WORDS[:2], "bad", *WORDS[2:]])
    bad = trajectories.pop(2)
    assert bad.stop_reason == StopReason.ERROR
    assert (bad.error.source, bad.error.type) == ("environment", "RetrievalError")
    assert [t.answer for t in trajectories] == WORDS
