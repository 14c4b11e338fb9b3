"""Late-interaction search against the time of reading its index once, and against colpali-engine's scorer.

    python benchmarks/late_interaction.py exact coarse --pages 5000

The pages are made up, in the shape of ColQwen2.5's: 700 to 775 unit vectors of 128 numbers, most of them near
one of a few patterns that a document repeats, some near patterns that every page has (margins, blank paper).
A query is 14 of a page's vectors and 6 common ones, with noise. "Floor": every byte of the float16 index is
read once, on one thread. What is compared runs in turns; times are medians. colpali-engine's scorer runs
where the package is installed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from rollout.tables import format_table
from visor.retrieval.base import Query
from visor.retrieval.coarse import SAMPLE, open_stage, write_coarse
from visor.retrieval.encoding import EncoderIdentity, PageVectors, QueryVectors
from visor.retrieval.generations import VectorStore, open_vectors
from visor.retrieval.maxsim import MaxSim
from visor.retrieval.maxsim_kernels import fastest_precision
from visor.retrieval.vector_writer import build_vectors
from visor.types import Page, make_page_id

DIMENSION, SHORTEST, LONGEST = 128, 700, 775
DOCUMENT_PAGES, PATTERNS, PATTERNS_OF_DOCUMENT, PATTERNS_OF_PAGE, COMMON = 20, 2000, 60, 20, 5
NOISE = 0.06
REFERENCES = 2
"""Queries that the slow reference answers."""
QUERY_TOKENS, COMMON_TOKENS, K, BATCH = 14, 6, 5, 16


class MadeUpPages:
    """A corpus without images, and the encoder that makes its vectors up."""

    name = "made-up"
    identity = EncoderIdentity(
        name="made-up", kind="multi", dimension=DIMENSION, pooling="none", reads="text"
    )

    def __init__(self, count: int):
        self._random = torch.Generator().manual_seed(0)
        shared = 0.5 * torch.randn(1, DIMENSION, generator=self._random)
        patterns = torch.randn(PATTERNS, DIMENSION, generator=self._random) + shared
        self.patterns = torch.nn.functional.normalize(patterns, dim=1)
        self._pages = []
        for i in range(count):
            doc_id, number = f"d{i // DOCUMENT_PAGES:05d}", i % DOCUMENT_PAGES + 1
            page = Page(
                page_id=make_page_id(doc_id, number),
                doc_id=doc_id,
                page_number=number,
                image="",
                width=1,
                height=1,
                text=str(i),
            )
            self._pages.append(page)

    def pages(self) -> list[Page]:
        return self._pages

    def encode_pages(self, pages, store) -> list[PageVectors]:
        return [PageVectors(self._vectors(int(page.text))) for page in pages]

    def _vectors(self, i: int) -> np.ndarray:
        rng = np.random.default_rng(i)
        document = np.random.default_rng(10**9 + i // DOCUMENT_PAGES).integers(
            0, PATTERNS, PATTERNS_OF_DOCUMENT
        )
        own = np.concatenate([rng.choice(document, PATTERNS_OF_PAGE), np.arange(COMMON)])
        which = rng.choice(own, rng.integers(SHORTEST, LONGEST + 1))
        return self.noisy(self.patterns[which], NOISE).half().numpy()

    def noisy(self, vectors: torch.Tensor, noise: float) -> torch.Tensor:
        vectors = vectors + noise * torch.randn(vectors.shape, generator=self._random)
        return torch.nn.functional.normalize(vectors, dim=1)

    def query(self, store: VectorStore, i: int) -> QueryVectors:
        rng = np.random.default_rng(2 * 10**9 + i)
        page = store.page_vectors(store.table.page_ids[rng.integers(len(store.table))])
        own = torch.from_numpy(page[rng.integers(0, len(page), QUERY_TOKENS)].astype(np.float32))
        common = self.patterns[torch.from_numpy(rng.integers(0, COMMON, COMMON_TOKENS))]
        return QueryVectors(self.noisy(torch.cat([own, common]), NOISE).numpy())

    @staticmethod
    def libraries() -> dict[str, str]:
        return {}


def read_once(store: VectorStore) -> None:
    for shard in store.shards:
        np.bitwise_xor.reduce(np.asarray(shard.vectors).reshape(-1).view(np.int64))


def page_by_page(store: VectorStore, query: QueryVectors) -> list[str]:
    """A slow float32 reference: the best K pages."""
    scores = np.full(len(store.table), -np.inf, np.float32)
    asked = torch.from_numpy(query.vectors_TD)
    for shard in store.shards:
        for first, end, row in zip(shard.offsets[:-1], shard.offsets[1:], shard.rows):
            page = torch.from_numpy(np.array(shard.vectors[first:end])).float()
            scores[row] = float(torch.mm(asked, page.t()).amax(dim=1).sum())
    return [store.table.page_ids[row] for row in np.argsort(-scores, kind="stable")[:K]]


def interleaved(work: dict[str, Callable[[int], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each; all take turns, after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(-1, repeats):
        for name, run in work.items():
            start = time.perf_counter()
            run(max(repeat, 0))
            if repeat >= 0:
                times[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in times.items()}


def exact(store: VectorStore, queries: list[QueryVectors], repeats: int, threads: int) -> None:
    fast = MaxSim(store.shards, store.table, threads)
    float32 = MaxSim(store.shards, store.table, threads, precision="float32")
    asked = [Query("", K)]
    batch = queries[:BATCH]
    start = time.perf_counter()
    fast.search(queries[:1], asked)
    first = time.perf_counter() - start
    times = interleaved(
        {
            "floor: read the index once, one thread": lambda i: read_once(store),
            "one query": lambda i: fast.search([queries[i]], asked),
            f"batch of {BATCH}, a query": lambda i: fast.search(batch, asked * BATCH),
            "one query, brute force in float32": lambda i: float32.search([queries[i]], asked),
        },
        repeats,
    )
    start, references = time.perf_counter(), [page_by_page(store, query) for query in queries[:REFERENCES]]
    slow = {"plain float32, page by page": (time.perf_counter() - start) / REFERENCES}
    slow |= colpali(store, queries, threads)
    times[f"batch of {BATCH}, a query"] /= BATCH
    floor, one = times["floor: read the index once, one thread"], times["one query"]
    rows = [
        [name, f"{1e3 * seconds:.0f}", f"{seconds / floor:.2f}", f"{seconds / one:.2f}"]
        for name, seconds in {**times, **slow}.items()
    ]
    print(format_table(["search", "ms", "× floor", "× one query"], rows, "markdown"))
    right = sum(
        [hit.page_id for hit in fast.search([query], asked)[0]] == reference
        for query, reference in zip(queries, references)
    )
    print(f"\ntop {K} equal to those of the slow float32 reference: {right} of {REFERENCES} queries")
    print(f"scan in {fastest_precision(DIMENSION)}, {threads} threads; first search {first:.1f} s\n")


def colpali(store: VectorStore, queries: list[QueryVectors], threads: int) -> dict[str, float]:
    try:
        from colpali_engine.models import ColQwen2_5_Processor
    except ImportError:
        return {}
    pages = [torch.from_numpy(np.array(store.page_vectors(p))).float() for p in store.table.page_ids]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    times = interleaved(
        {
            f"colpali-engine's score_multi_vector, float32, {threads} threads": lambda i: (
                ColQwen2_5_Processor.score_multi_vector(
                    [torch.from_numpy(queries[i].vectors_TD)], pages, device="cpu"
                )
            )
        },
        2,
    )
    torch.set_num_threads(before)
    return times


def coarse(store: VectorStore, queries: list[QueryVectors], repeats: int, threads: int, qdrant: bool) -> None:
    plain = MaxSim(store.shards, store.table, threads)
    asked = [Query("", K)]
    searches, sizes, recalls = {}, {}, {}
    for stage in ("int8", "pooled"):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            record = write_coarse(store, folder, stage)
            searches[stage] = open_stage(store, folder, stage, record.candidates or 0, threads)
            sizes[stage] = sum(file.stat().st_size for file in folder.iterdir())
            recalls[stage] = record.recall
            searches[stage].search(queries[:1], asked)  # its files stay mapped
    if qdrant:
        from visor.retrieval.qdrant import FOLDER, open_collection, write_collection

        recalls["qdrant"] = write_collection(store).recall
        searches["qdrant"] = open_collection(store, threads=threads)
        files = (store.path / FOLDER).rglob("*")
        sizes["qdrant"] = sum(file.stat().st_blocks * 512 for file in files if file.is_file())
    best = plain.search(queries, asked * len(queries))
    work = {"floor": lambda i: read_once(store), "exact": lambda i: plain.search([queries[i]], asked)}
    for stage, search in searches.items():
        work[stage] = lambda i, search=search: search.search([queries[i]], asked)
    times = interleaved(work, repeats)
    rows = []
    for stage, search in searches.items():
        found = search.search(queries, asked * len(queries))
        pairs = zip(best, found)
        recall = np.mean([len({h.page_id for h in a} & {h.page_id for h in b}) / K for a, b in pairs])
        seconds = times[stage]
        rows.append(
            [
                stage,
                f"{1e3 * seconds:.0f}",
                f"{seconds / times['floor']:.2f}",
                f"{times['exact'] / seconds:.1f}",
                f"{recall:.3f}",
                f"{recalls[stage]:.3f}",
                f"{sizes[stage] / store.bytes_on_disk():.2f}",
            ]
        )
    columns = ["stage", "ms", "× floor", "exact / stage", f"recall@{K}", "of the build", "size / vectors"]
    print(format_table(columns, rows, "markdown"))
    print(
        f"\nrecall@{K} against exact search: of these {len(queries)} queries, and as the build measures it, "
        f"with vectors of {SAMPLE} pages; floor {1e3 * times['floor']:.0f} ms, {threads} threads\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="exact|coarse", help="default: both")
    parser.add_argument("--pages", type=int, default=5000, help="5000 take 0.95 GB on disk and in the cache")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--qdrant", action="store_true", help="measure that stage, too (writing takes minutes)"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - {"exact", "coarse"}:
        parser.error(f"unknown part {', '.join(unknown)}")
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        pages = MadeUpPages(arguments.pages)
        report = build_vectors(pages, folder, pages, batch_size=64)
        start = time.perf_counter()
        store = open_vectors(folder)
        seconds = time.perf_counter() - start
        print(
            f"{report.page_count} pages, {report.bytes_on_disk / 1e6:.0f} MB, made and written in "
            f"{report.seconds:.0f} s; opened in {1e3 * seconds:.0f} ms\n"
        )
        queries = [pages.query(store, i) for i in range(max(BATCH, 50))]
        for part in arguments.parts or ["exact", "coarse"]:
            if part == "exact":
                exact(store, queries, arguments.repeats, arguments.threads)
            else:
                coarse(store, queries, arguments.repeats, arguments.threads, arguments.qdrant)


if __name__ == "__main__":
    main()
