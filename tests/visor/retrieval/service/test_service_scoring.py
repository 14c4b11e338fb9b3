"""The scoring thread: batches, cancelled searches, a full queue, a retriever that fails."""

import asyncio
import threading

import pytest

from visor.retrieval.base import Query, ScoredPage
from visor.retrieval.service.limits import Limits, Refused
from visor.retrieval.service.scoring import Opened, Scorer


class Held:
    """Gives each query a page named after it, once `gate` is open; keeps the batches it was asked."""

    name = "held"

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.batches = []

    def search(self, query, k):
        return self.search_batch([Query(query, k)])[0]

    def search_batch(self, queries):
        self.batches.append([query.text for query in queries])
        self.entered.set()
        assert self.gate.wait(10)
        if any(query.text == "bad" for query in queries):
            raise KeyError("shard 7")
        return [[ScoredPage(f"{query.text}#page=1", 1.0)][: query.k] for query in queries]


def run(play, retriever=None, **limits):
    """Play a coroutine with a ready scorer and its retriever."""
    retriever = retriever or Held()

    async def main():
        ready = threading.Event()
        manifest = {"retriever": "held"}
        scorer = Scorer(lambda: Opened(retriever, manifest), Limits(**limits), on_ready=ready.set)
        with pytest.raises(Refused) as early:
            await scorer.search([Query("early", 1)])
        assert (early.value.status, early.value.retry_after) == (503, 1)
        scorer.start()
        assert await asyncio.to_thread(ready.wait, 10)
        retriever.batches.clear()
        retriever.entered.clear()
        try:
            return await play(scorer, retriever)
        finally:
            retriever.gate.set()
            scorer.stop()

    return asyncio.run(main())


async def hold(scorer, retriever):
    """A first search, which the retriever is busy with; everything after it waits."""
    retriever.gate.clear()
    first = asyncio.ensure_future(scorer.search([Query("first", 1)]))
    assert await asyncio.to_thread(retriever.entered.wait, 10)
    return first


def names(ranked):
    return [hit.page_id.partition("#")[0] for hits in ranked for hit in hits]


def test_what_waits_is_scored_in_one_batch_and_each_gets_its_own():
    async def play(scorer, retriever):
        first = await hold(scorer, retriever)
        asked = [[Query(f"{n}{letter}", 1) for letter in "ab"] for n in range(8)]
        later = [asyncio.ensure_future(scorer.search(queries)) for queries in asked]
        await asyncio.sleep(0)
        retriever.gate.set()
        assert names(await first) == ["first"]
        assert [names(await search) for search in later] == [[f"{n}a", f"{n}b"] for n in range(8)]
        assert [len(batch) for batch in retriever.batches] == [1, 16]

    run(play)


def test_batches_are_bounded_and_requests_stay_whole():
    async def play(scorer, retriever):
        first = await hold(scorer, retriever)
        sizes = [3, 2, 9, 1, 1]
        later = [
            asyncio.ensure_future(scorer.search([Query(f"{n}", 1)] * size)) for n, size in enumerate(sizes)
        ]
        await asyncio.sleep(0)
        retriever.gate.set()
        await asyncio.gather(first, *later)
        assert [len(batch) for batch in retriever.batches] == [1, 3, 2, 9, 2]

    run(play, max_batch=4)


def test_a_cancelled_search_is_not_scored():
    async def play(scorer, retriever):
        first = await hold(scorer, retriever)
        gone, stays = (asyncio.ensure_future(scorer.search([Query(text, 1)])) for text in ("gone", "stays"))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        retriever.gate.set()
        assert names(await stays) == ["stays"]
        await first
        assert ["gone"] not in retriever.batches
        assert retriever.batches == [["first"], ["stays"]]

    run(play)


def test_a_full_queue_turns_away_with_a_time_and_recovers():
    async def play(scorer, retriever):
        first = await hold(scorer, retriever)
        waiting = [asyncio.ensure_future(scorer.search([Query("w", 1)])) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Refused, match="3 queries are waiting") as refused:
            await scorer.search([Query("late", 1)])
        assert refused.value.status == 429
        assert refused.value.retry_after >= 1
        retriever.gate.set()
        await asyncio.gather(first, *waiting)
        assert names(await scorer.search([Query("late", 1)])) == ["late"]

    run(play, max_waiting=3)


def test_a_request_larger_than_the_queue_is_served_when_nothing_waits():
    async def play(scorer, retriever):
        assert len(await scorer.search([Query("x", 1)] * 5)) == 5

    run(play, max_waiting=3)


def test_only_the_request_that_breaks_the_retriever_fails():
    async def play(scorer, retriever):
        first = await hold(scorer, retriever)
        texts = ["good", "bad", "fine"]
        later = [asyncio.ensure_future(scorer.search([Query(text, 1)])) for text in texts]
        await asyncio.sleep(0)
        retriever.gate.set()
        await first
        good, bad, fine = await asyncio.gather(*later, return_exceptions=True)
        assert (names(good), names(fine)) == (["good"], ["fine"])
        assert (bad.status, bad.sentence) == (503, "the retriever failed: KeyError: 'shard 7'.")
        with pytest.raises(Refused):
            await scorer.search([Query("bad", 1)])
        assert scorer.broken == "KeyError: 'shard 7'"
        await scorer.search([Query("good", 1)])
        assert scorer.broken is None

    run(play)


def test_queries_without_text_never_reach_the_retriever():
    async def play(scorer, retriever):
        ranked = await scorer.search([Query("", 5), Query("a", 5), Query(" \n\t", 5)])
        assert (ranked[0], names(ranked), ranked[2]) == ([], ["a"], [])
        assert await scorer.search([Query("  ", 5)]) == [[]]
        assert retriever.batches == [["a"]]

    run(play)


def test_searches_that_wait_at_the_end_are_refused():
    async def play(scorer, retriever):
        first = await hold(scorer, retriever)
        late = asyncio.ensure_future(scorer.search([Query("late", 1)]))
        await asyncio.sleep(0)
        scorer.stop()
        retriever.gate.set()
        assert names(await first) == ["first"]
        with pytest.raises(Refused, match="shutting down") as refused:
            await late
        assert refused.value.status == 503

    run(play)


def test_a_retriever_whose_answers_depend_on_the_batch_is_not_served(capsys):
    class Moody(Held):
        def search_batch(self, queries):
            return [[ScoredPage(f"{len(queries)}#page=1", 1.0)] for _ in queries]

    async def main():
        scorer = Scorer(lambda: Opened(Moody(), {}))
        scorer.start()
        while scorer.state == "opening":
            await asyncio.sleep(0.01)
        with pytest.raises(Refused, match=r"failed its self-check: the retriever 'held' answers .* alone"):
            await scorer.search([Query("x", 1)])
        assert scorer.state == "unfit"
        scorer.stop()

    asyncio.run(main())
    assert "not serving: the retriever failed its self-check" in capsys.readouterr().err


def test_an_index_that_does_not_open_is_told():
    def fail():
        raise ValueError("the index ix is damaged (short file); rebuild it")

    told = threading.Event()
    scorer = Scorer(fail, on_failure=told.set)
    scorer.start()
    assert told.wait(10)
    with pytest.raises(Refused, match="cannot be opened: the index ix is damaged"):
        scorer.check_ready()
