"""The parts of the `visor` command that prepare data: formats of documents, and captions.

`visor.cli` lists the commands. Libraries are imported inside the functions, so that `visor --help` is quick.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

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
