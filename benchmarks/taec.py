"""What the decisions of the TAEC layer cost, image encoding and model calls apart.

A question is played search by search, all operators on, and its last step is timed: CPU time, the least of
the repeats, since other work on the machine only adds to it. A step of the layer over a VISOR policy: one
admission (of a repeated query, so that gains are computed), the evidence of all nodes rendered, the pictures
of all earlier turns allocated. A step over the DAG agent: one admission of five, the graph, the hints, the
pictures. Each step meets 25 candidates that no step before it has met and one new thought; nothing is known
of any text when a question begins. The limits are the project's own: 2 ms a step at 25 candidates and 20
nodes, at most one model call a question, growth in nodes no faster than linear.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice, product
from pathlib import Path
from timeit import timeit

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from rollout.tables import format_table
from visor.env.graph import ActionGraph, PlainGraphPolicy
from visor.env.policy import EpisodeView, EvidenceEntry, ShownPicture
from visor.models.base import Request
from visor.retrieval.base import ScoredPage
from visor.taec import text
from visor.taec.captions import Captions
from visor.taec.config import TaecConfig
from visor.taec.exposure import load_cues
from visor.taec.graph_policy import TaecGraphPolicy
from visor.taec.policy import TaecPolicy
from visor.taec.requirements import ModelSlotExtractor
from visor.types import Completion, ImageRef, Message, Page, Question, text_message

LIMIT_MS, NODES, CANDIDATES = 2.0, 20, 25
QUESTION = Question(question_id="q", text="revenue growth of the northern region in 2023")
ALL = TaecConfig(allocation={"enabled": True, "represent_pages": 5})
THOUGHTS = (
    "The page lists the branches of the northern region. It clearly shows a revenue of 4.2 million in 2022. "
    "The growth of the following year is not given here, so another page is needed.",
    "This page is about staff. The revenue growth was not found here.",
    "A table of regions and years; the northern one may stand in the third row, which is hard to make out.",
)
clock = partial(timeit, setup="gc.enable()", number=1, timer=time.process_time)


class Collection:
    """A corpus of captions with words in common."""

    def __init__(self, pages: int, words: int):
        chance = random.Random(0)
        words_of = ["".join(letters) for letters in product("bdglmnrst", "aeiou", "klmnprst", "aeiou")]
        vocabulary = words_of + ["revenue", "growth", "northern", "2023", "4,200", "3.9"] * 20
        texts = {f"d#page={n}": " ".join(chance.choices(vocabulary, k=words)) for n in range(1, pages + 1)}
        page = partial(Page, doc_id="d", page_number=1, image="x", width=1, height=1)
        self._pages = {page_id: page(page_id=page_id, caption=text) for page_id, text in texts.items()}

    def page(self, page_id: str) -> Page:
        return self._pages[page_id]

    def pages(self) -> list[Page]:
        return list(self._pages.values())

    def candidates(self, start: int, count: int) -> list[ScoredPage]:
        return [ScoredPage(f"d#page={start + n}", 1 / (n + 1)) for n in range(1, count + 1)]


def forget() -> None:
    """Forget what has been read of any text, as in a new process."""
    text.normalise.cache_clear()
    text.tokens.cache_clear()
    load_cues.cache_clear()


def visor_steps(store: Collection, captions: Captions, candidates: int) -> Iterator[Callable[[], None]]:
    """The decisions of step after step of one episode whose window keeps every turn."""
    layer = TaecPolicy(ALL, QUESTION, store, captions=captions)
    view = EpisodeView(QUESTION, page_max_pixels=300_000)
    context: list[Message] = []
    for node in count():
        hits = store.candidates(node * candidates, candidates)

        def step(hits=hits) -> None:
            page_id = layer.select("query", hits, view)
            view.shown_page_ids.append(page_id)
            for entry in view.entries:
                layer.render(entry, view)
            layer.represent(view.pictures[:-2], view)
            layer.allocate(view.pictures[:-1], context, view)

        yield step
        page_id, thought = view.shown_page_ids[-1], f"{THOUGHTS[node % 3]} {node}"
        view.queries.append("query")
        view.entries.append(EvidenceEntry(page_id, pre=thought, search_index=node, in_window=False))
        image = ImageRef(page_id=page_id, min_pixels=784, max_pixels=300_000)
        view.pictures.append(ShownPicture(image, node, node))
        context.append(text_message("user", thought))


def dag_steps(store: Collection, captions: Captions, candidates: int) -> Iterator[Callable[[], None]]:
    """The same of one question of the DAG agent, a chain of searches that keeps a page of each."""
    layer = TaecGraphPolicy(ALL, QUESTION.text, captions, PlainGraphPolicy())
    graph = ActionGraph(QUESTION.text)
    for number in count():
        hits = store.candidates(number * candidates, candidates)
        admitted: list[str] = []

        def step(hits=hits, admitted=admitted) -> None:
            admitted += layer.admit("query", hits, 5, graph)
            shown = layer.render(graph)
            layer.hints(graph)
            layer.retained(graph, str(shown))

        yield step
        node, _ = graph.add_search(f"s{number}", [graph.nodes[-1].node_id], f"query {number}")
        node.pages, node.summary = admitted, f"{THOUGHTS[number % 3]} {number}"
        graph.keep(admitted[0], number % 5 + 1)


def milliseconds(steps, store, captions, nodes: int, candidates: int, repeats: int) -> float:
    """Least CPU time of the step that follows `nodes` searches."""
    times = []
    for _ in range(repeats):
        forget()
        episode = steps(store, captions, candidates)
        for step in islice(episode, nodes):
            step()
        times.append(clock(next(episode)))
    return 1000 * min(times)


class CountingClient:
    name = "counting"
    calls = 0

    async def complete(self, request: Request) -> Completion:
        self.calls += 1
        return Completion(text='["revenue", "growth", "2023"]')


def calls_a_question(samples: int) -> float:
    """Model calls for slots a question, when each question is asked `samples` times at once."""
    client = CountingClient()
    extractor = ModelSlotExtractor(client)

    async def ask() -> None:
        await asyncio.gather(*(extractor.extract(f"question {n}") for n in range(10) for _ in range(samples)))

    asyncio.run(ask())
    return client.calls / 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--candidates", type=int, default=CANDIDATES)
    parser.add_argument("--words", type=int, default=60, help="of a caption")
    arguments = parser.parse_args()
    sizes, rows, failed = (5, 10, 20, 40, 80), [], []
    store = Collection((max(sizes) + 1) * arguments.candidates, arguments.words)
    captions = Captions(store)
    assert captions.longest > 0  # read once for a corpus, not in a step
    for name, steps in (("visor", visor_steps), ("dag", dag_steps)):
        times = [
            milliseconds(steps, store, captions, nodes, arguments.candidates, arguments.repeats)
            for nodes in sizes
        ]
        # The exponent of growth in nodes, least squares on logarithms: 1 is linear.
        exponent = float(np.polyfit(np.log(sizes), np.log(times), 1)[0])
        rows.append((name, *times, times[sizes.index(NODES)] / LIMIT_MS, exponent))
        if times[sizes.index(NODES)] > LIMIT_MS:
            failed.append(
                f"{name}: {times[sizes.index(NODES)]:.2f} ms a step, over the limit of {LIMIT_MS} ms"
            )
        if exponent > 1.1:
            failed.append(f"{name}: time grows as nodes^{exponent:.2f}")
    header = ("ms a step", *(f"{nodes} nodes" for nodes in sizes), f"{NODES} nodes / limit", "exponent")
    print(format_table(header, rows))
    calls = calls_a_question(samples=5)
    print(f"\nmodel calls a question for slots: {calls:g} with a model, 0 with rules; none a step")
    if calls > 1:
        failed.append("more than one model call a question")
    print("\n".join(failed) or "all within their limits")


if __name__ == "__main__":
    main()
