"""The retrieval service under load, and what HTTP costs beside the search itself.

A real `visor serve` over a made-up corpus. The load mixes well-formed requests, each answer of which is
compared with the one in this process, with malformed bodies and with clients that vanish in the middle. Then
the time of a query in this process, over HTTP one by one, and over HTTP many at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from data.corpus import Corpus
from data.corpus_files import DocumentRecord, write_corpus
from rollout.tables import format_table
from visor.retrieval.base import BatchRetriever, Query
from visor.retrieval.client import RetrievalClient
from visor.retrieval.index import build_index, default_index_path, open_index
from visor.retrieval.service.process import ServiceProcess
from visor.types import Page, make_page_id

WORDS, WORDS_A_PAGE, PAGES_A_DOCUMENT = 20_000, 120, 20
GOOD, MALFORMED = 0.8, 0.1
"""Shares of the requests; the rest are sent by clients that vanish."""
BAD_BODIES = (
    b"",
    b"{",
    b"\xff\xfe\x00",
    b"[" * 50_000,
    b'{"queries":[{"id":"a","text":"\\ud800"}]}',
    b'{"queries":[{"id":"a","text":"x","top_k":NaN}]}',
    b'{"queries":[{"id":"a","text":"x","top_k":' + b"9" * 5000 + b"}]}",
    b'{"queries":[{"id":"a","text":"x"},{"id":"a","text":"y"}]}',
    b'{"queries":[{"id":"a","txt":"x"}]}',
    b'{"queries":[{"id":"a","text":"' + b"x" * 30_000 + b'"}]}',
    b" " * (2 << 20),
)
Hits = list[tuple[str, float]]


@dataclass
class Load:
    """What happened under load."""

    seconds: float = 0.0
    queries: int = 0
    latencies: list[float] = field(default_factory=list)
    """Seconds of each well-formed request."""
    statuses: Counter[str] = field(default_factory=Counter)
    """Of well-formed requests, of malformed ones ("malformed 422"), and of connections that broke."""
    vanished: int = 0
    wrong: list[str] = field(default_factory=list)

    def percentile(self, share: float) -> float:
        """Milliseconds."""
        return 1000 * sorted(self.latencies)[min(int(share * len(self.latencies)), len(self.latencies) - 1)]


def make_corpus(folder: Path, page_count: int, seed: int = 0) -> Corpus:
    """Pages of words that are as unequally frequent as a language's; no images."""
    draw = random.Random(seed)
    words = [f"{draw.choice('bcdfgklmnprst')}{number:x}" for number in range(WORDS)]
    weights = [1 / (rank + 10) for rank in range(WORDS)]
    pages = {}
    for number in range(page_count):
        doc_id = f"report {number // PAGES_A_DOCUMENT:04d}.pdf"
        page_number = number % PAGES_A_DOCUMENT + 1
        page_id = make_page_id(doc_id, page_number)
        text = " ".join(draw.choices(words, weights, k=WORDS_A_PAGE))
        pages[page_id] = Page(
            page_id=page_id,
            doc_id=doc_id,
            page_number=page_number,
            image="",
            width=1,
            height=1,
            text=text,
        )
    documents = {p.doc_id: DocumentRecord(doc_id=p.doc_id, status="done") for p in pages.values()}
    folder.mkdir(parents=True)
    write_corpus(folder, documents, pages)
    corpus = Corpus.open(folder)
    build_index(corpus, default_index_path(folder))
    return corpus


def make_queries(corpus: Corpus, count: int, seed: int = 1) -> list[Query]:
    """A few words of a page each, some with exclusions or a filter, some without a word."""
    draw = random.Random(seed)
    pages = corpus.pages()
    queries = []
    for _ in range(count):
        page = draw.choice(pages)
        text = " ".join(draw.sample(page.text.split(), draw.randint(1, 6)))
        kind = draw.random()
        if kind < 0.1:
            queries.append(Query(text, 5, frozenset({page.page_id})))
        elif kind < 0.2:
            queries.append(Query(text, 5, doc_ids=frozenset({page.doc_id, "none.pdf"})))
        else:
            queries.append(Query(text if kind < 0.97 else "  ", draw.choice([1, 5, 10, 40])))
    return queries


# ---------------------------------------------------------------- load


class Worker:
    """One user: a connection that is kept, until it breaks or the user drops it."""

    def __init__(self, port: int, queries: list[Query], expected: list[Hits], load: Load, seed: int):
        self.port, self.queries, self.expected, self.load = port, queries, expected, load
        self.draw = random.Random(seed)
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def run(self, until: float) -> None:
        while time.monotonic() < until:
            kind = self.draw.random()
            try:
                if kind < GOOD:
                    await self.ask_well()
                elif kind < GOOD + MALFORMED:
                    await self.ask_badly()
                else:
                    await self.vanish()
            except (OSError, asyncio.IncompleteReadError) as error:
                self.load.statuses[type(error).__name__] += 1
                await self.drop()
        await self.drop()

    async def ask_well(self) -> None:
        chosen = [self.draw.randrange(len(self.queries)) for _ in range(self.draw.choice([1, 1, 1, 4]))]
        started = time.perf_counter()
        status, body = await self.send(self.body(chosen))
        self.load.latencies.append(time.perf_counter() - started)
        self.load.statuses[str(status)] += 1
        if status != 200:
            return
        self.load.queries += len(chosen)
        results = json.loads(body)["results"]
        for place, number in enumerate(chosen):
            hits = [(hit["page_id"], hit["score"]) for hit in results[place]["hits"]]
            if results[place]["id"] != str(place) or hits != self.expected[number]:
                self.load.wrong.append(f"{self.queries[number]} gave {hits}")

    async def ask_badly(self) -> None:
        status, body = await self.send(self.draw.choice(BAD_BODIES))
        self.load.statuses[f"malformed {status}"] += 1
        if not 400 <= status < 500 or not json.loads(body)["detail"]:
            self.load.wrong.append(f"a malformed body gave {status} {body[:100]!r}")

    async def vanish(self) -> None:
        """Drop the connection in the middle of the body, or after it without reading the reply."""
        _, writer = await self.connected()
        request = self.request(self.body([self.draw.randrange(len(self.queries)) for _ in range(4)]))
        writer.write(request[: self.draw.choice([20, len(request) - 5, len(request)])])
        await writer.drain()
        self.load.vanished += 1
        await self.drop()

    def body(self, chosen: list[int]) -> bytes:
        asked = []
        for place, number in enumerate(chosen):
            query = self.queries[number]
            one = {"id": str(place), "text": query.text, "top_k": query.k}
            one["exclude_page_ids"] = sorted(query.exclude_page_ids)
            one["filter"] = {"doc_ids": None if query.doc_ids is None else sorted(query.doc_ids)}
            asked.append(one)
        return json.dumps({"queries": asked}).encode()

    @staticmethod
    def request(body: bytes) -> bytes:
        return b"POST /v1/search HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    async def send(self, body: bytes) -> tuple[int, bytes]:
        reader, writer = await self.connected()
        writer.write(self.request(body))
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
        reply = await reader.readexactly(length)
        if b"connection: close" in head:
            await self.drop()
        return int(head.split()[1]), reply

    async def connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 22)
        return self.streams

    async def drop(self) -> None:
        if self.streams is not None:
            self.streams[1].transport.abort()
            self.streams = None


def put_under_load(
    port: int, queries: list[Query], expected: list[Hits], seconds: float, concurrency: int
) -> Load:
    """Play `concurrency` users for so long."""
    load = Load()

    async def play() -> None:
        until = time.monotonic() + seconds
        workers = [Worker(port, queries, expected, load, seed) for seed in range(concurrency)]
        await asyncio.gather(*(worker.run(until) for worker in workers))

    started = time.monotonic()
    asyncio.run(play())
    load.seconds = time.monotonic() - started
    return load


def in_process(retriever: BatchRetriever, queries: list[Query]) -> list[Hits]:
    """The right answers."""
    return [[(hit.page_id, hit.score) for hit in hits] for hits in retriever.search_batch(queries)]


# ---------------------------------------------------------------- what HTTP costs


def costs(
    retriever: BatchRetriever, client: RetrievalClient, queries: list[Query], repeats: int
) -> list[tuple]:
    """Rows: how it is asked, ms a query (median of the repeats, in turns), times the time in process."""
    with ThreadPoolExecutor(8) as threads:
        ways = {
            "in process, one by one": lambda: [retriever.search_batch([query]) for query in queries],
            "HTTP, one by one": lambda: [client.search_batch([query]) for query in queries],
            "HTTP, 8 at once": lambda: list(threads.map(lambda query: client.search_batch([query]), queries)),
            "HTTP, 32 a request": lambda: [
                client.search_batch(queries[start : start + 32]) for start in range(0, len(queries), 32)
            ],
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeats):
            for name, way in ways.items():
                started = time.perf_counter()
                way()
                times[name].append(1000 * (time.perf_counter() - started) / len(queries))
    base = median(times["in process, one by one"])
    return [(name, median(seen), median(seen) / base) for name, seen in times.items()]


def memory(pid: int) -> float:
    """Resident megabytes of a process; NaN where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return float("nan")
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20, help="of load (default: 20)")
    parser.add_argument("--concurrency", type=int, default=16, help="users at once (default: 16)")
    parser.add_argument("--pages", type=int, default=5000, help="of the corpus (default: 5000)")
    parser.add_argument("--repeats", type=int, default=5, help="of the comparison (default: 5)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        corpus = make_corpus(Path(folder, "corpus"), arguments.pages)
        retriever = open_index(default_index_path(corpus.path), corpus)
        queries = make_queries(corpus, 1000)
        expected = in_process(retriever, queries)
        with ServiceProcess(corpus.path) as service:
            before = memory(service.process.pid)
            load = put_under_load(service.port, queries, expected, arguments.seconds, arguments.concurrency)
            after = memory(service.process.pid)
            with RetrievalClient(service.url, pages=corpus.pages()) as client:
                rows = costs(retriever, client, queries[:320], arguments.repeats)
            status = service.stop()
    count = len(load.latencies)
    print(f"{arguments.pages} pages, {arguments.concurrency} users, {load.seconds:.0f} s")
    print(
        f"well-formed requests {count}: {count / load.seconds:.0f} a second, {load.queries} queries compared"
    )
    print("latency: " + ", ".join(f"p{p} {load.percentile(p / 100):.1f} ms" for p in (50, 95, 99)))
    print(f"vanished clients {load.vanished}; statuses {dict(sorted(load.statuses.items()))}")
    print(f"wrong answers {len(load.wrong)}; memory of the service {before:.0f} → {after:.0f} MB")
    print(f"exit status at SIGTERM {status}\n")
    print(format_table(("a query", "ms", "× in process"), rows))
    for line in load.wrong[:5]:
        print(line, file=sys.stderr)
    return 1 if load.wrong or status else 0


if __name__ == "__main__":
    sys.exit(main())
