"""The parts of the `visor` command that prepare data: formats of documents, and captions.

`visor.cli` lists the commands. Libraries are imported inside the functions, so that `visor --help` is quick.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

EXIT_OK, EXIT_FAILED, EXIT_PARTLY = 0, 1, 3

# ---------------------------------------------------------------- ingest


def format_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `visor ingest` for documents of a benchmark."""
    parser.add_argument(
        "--format",
        default="files",
        metavar="FORMAT",
        help="how the documents lie: files (PDFs and images, the default), page-images, slidevqa, vidoseek, "
        "mmlongbench or docbench",
    )
    parser.add_argument(
        "--questions",
        metavar="FILE",
        help="where a benchmark's questions go (default: CORPUS/questions.jsonl)",
    )


def ingest_function(arguments: argparse.Namespace) -> Callable[..., Any]:
    """`data.ingest.ingest`, or what takes its place for the format asked for."""
    from data.benchmarks import ingest_as

    return ingest_as(arguments.format, arguments.questions)


# ---------------------------------------------------------------- caption


def caption_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "exit status: 0 every page asked for has a caption; 1 the run stopped, or no page has "
        "one; 2 wrong use or unusable input; 3 some pages failed, each named with its reason"
    )
    parser.add_argument("corpus", metavar="CORPUS")
    parser.add_argument(
        "--model",
        required=True,
        metavar="SPEC",
        help="openai:NAME@URL (any OpenAI-compatible endpoint that sees images; key in OPENAI_API_KEY), "
        "hf:PATH or vllm:PATH",
    )
    parser.add_argument("--concurrency", type=int, default=4, help="pages asked at once (default: 4)")
    parser.add_argument(
        "--max-pixels", type=int, help="pixels at which a page is shown, at most (default: 1003520)"
    )
    parser.add_argument("--max-tokens", type=int, help="tokens of a caption, at most (default: 512)")
    parser.add_argument("--limit", type=int, help="ask for at most so many pages")
    parser.add_argument(
        "--replace",
        action="store_true",
        help="ask for every page again where there are captions of another model, prompt or budget",
    )


def run_caption(arguments: argparse.Namespace) -> int:
    from data.captions import caption_corpus
    from visor.progress import ProgressLines

    budgets = {"max_pixels": arguments.max_pixels, "max_tokens": arguments.max_tokens}
    with ProgressLines("pages") as update:
        report = caption_corpus(
            arguments.corpus,
            arguments.model,
            concurrency=arguments.concurrency,
            limit=arguments.limit,
            replace=arguments.replace,
            progress=lambda done, total, page_id: update(done, total),
            **{name: value for name, value in budgets.items() if value is not None},
        )
    print(report.summary())
    if report.stopped or not report.ok:
        return EXIT_FAILED
    return EXIT_PARTLY if report.failed else EXIT_OK
