"""The `visor` command: a table of subcommands, each a pair of small functions.

A subcommand is one entry in COMMANDS: its help line, a function that adds its arguments, and a function that
runs it and returns the exit code. Libraries and sibling packages are imported inside the functions, so that
`visor --help` is quick. A ValueError is a message to the user (exit code 2), not a traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_PARTLY = 0, 1, 2, 3


@dataclass(frozen=True)
class Command:
    """One subcommand."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0 done, 1 failed, 2 wrong use or unusable input, 3 done
    in part."""
    arguments = build_parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except BrokenPipeError:
        return EXIT_OK  # the reader of our output, such as `head`, has seen enough
    except (ValueError, OSError) as error:
        print(f"visor {arguments.command}: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The parser over all COMMANDS."""
    parser = argparse.ArgumentParser(prog="visor", description="Visual RAG agents over collections of pages.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.help, description=command.help)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


# ---------------------------------------------------------------- ingest


def _ingest_arguments(parser: argparse.ArgumentParser) -> None:
    from data.commands import format_arguments

    parser.epilog = (
        "exit status: 0 every document is in the corpus; 1 none is; 2 wrong use or unusable input; "
        "3 some are, and the output names those that failed, each with its reason"
    )
    parser.add_argument("documents", nargs="*", metavar="DOCS", help="PDFs, images, or folders of them")
    parser.add_argument("-o", "--output", required=True, metavar="CORPUS", help="folder of the corpus")
    parser.add_argument("--dpi", type=float, default=144, help="resolution of PDF pages (default: 144)")
    parser.add_argument("--max-pixels", type=int, help="cap on a page's pixels (default: 12845056)")
    parser.add_argument("--image-format", choices=["jpeg", "png"], default="jpeg", help="(default: jpeg)")
    parser.add_argument(
        "--ocr",
        choices=["auto", "on", "off"],
        default="auto",
        help="read pages without a text layer; auto: when extra `ocr` is installed (default: auto)",
    )
    parser.add_argument("--workers", type=int, help="processes (default: one a core)")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=600,
        metavar="SECONDS",
        help="for a few pages; a document that takes longer has failed (default: 600)",
    )
    parser.add_argument(
        "--remove", nargs="+", metavar="DOC_ID", help="take these documents out; give no DOCS then"
    )
    format_arguments(parser)


def _run_ingest(arguments: argparse.Namespace) -> int:
    from data.commands import ingest_function
    from data.corpus import remove_documents
    from data.progress import ProgressBar

    if bool(arguments.documents) == bool(arguments.remove):
        raise ValueError("give either documents to ingest or --remove with ids of documents to take out")
    if arguments.remove:
        print(remove_documents(arguments.remove, arguments.output).summary())
        return EXIT_OK
    options = {"max_pixels": arguments.max_pixels} if arguments.max_pixels is not None else {}
    with ProgressBar(sys.stderr) as progress:
        report = ingest_function(arguments)(
            arguments.documents,
            arguments.output,
            dpi=arguments.dpi,
            image_format=arguments.image_format,
            ocr=arguments.ocr,
            workers=arguments.workers,
            time_limit=arguments.time_limit,
            progress=progress,
            **options,
        )
    print(report.summary())
    if not report.ok:
        return EXIT_FAILED
    return EXIT_PARTLY if report.failed else EXIT_OK


# ---------------------------------------------------------------- index and search


def _index_arguments(parser: argparse.ArgumentParser) -> None:
    from visor.retrieval.commands import index_arguments

    index_arguments(parser)


def _run_index(arguments: argparse.Namespace) -> int:
    from data.corpus import Corpus
    from visor.retrieval.commands import run_index

    return run_index(arguments, Corpus.open)


def _search_arguments(parser: argparse.ArgumentParser) -> None:
    from visor.retrieval.commands import search_arguments

    search_arguments(parser)


def _run_search(arguments: argparse.Namespace) -> int:
    from data.corpus import Corpus
    from visor.retrieval.commands import run_search

    return run_search(arguments, Corpus.open)


# ---------------------------------------------------------------- serve


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    from visor.retrieval.service.command import serve_arguments

    serve_arguments(parser)


def _run_serve(arguments: argparse.Namespace) -> int:
    from data.corpus import Corpus
    from visor.retrieval.service.command import run_serve

    return run_serve(arguments, Corpus.open(arguments.corpus))


def _vllm_serve_arguments(parser: argparse.ArgumentParser) -> None:
    from visor.models.vllm_server import serve_arguments

    serve_arguments(parser)


def _run_vllm_serve(arguments: argparse.Namespace) -> int:
    from visor.models.vllm_server import run_serve

    return run_serve(arguments)


# ---------------------------------------------------------------- runs


def _on_runs(name: str, help_line: str) -> Command:
    """A subcommand whose two functions stand in `rollout.commands`; they are imported when it is parsed."""

    def find(function: str) -> Callable:
        from rollout import commands

        return getattr(commands, function)

    return Command(
        help_line,
        lambda parser: find(f"{name}_arguments")(parser),
        lambda arguments: find(f"run_{name}")(arguments),
    )


def _on_data(name: str, help_line: str) -> Command:
    """The same for functions that stand in `data.commands`."""

    def find(function: str) -> Callable:
        from data import commands

        return getattr(commands, function)

    return Command(
        help_line,
        lambda parser: find(f"{name}_arguments")(parser),
        lambda arguments: find(f"run_{name}")(arguments),
    )


COMMANDS: dict[str, Command] = {
    "ingest": Command("turn PDFs and images into a corpus", _ingest_arguments, _run_ingest),
    "caption": _on_data("caption", "write a caption for each page with a vision model"),
    "index": Command("index a corpus for search", _index_arguments, _run_index),
    "search": Command("rank the pages of a corpus for a query", _search_arguments, _run_search),
    "serve": Command("answer searches over HTTP", _serve_arguments, _run_serve),
    "vllm-serve": Command("sample from a model over HTTP, with vLLM", _vllm_serve_arguments, _run_vllm_serve),
    "ask": _on_runs("ask", "answer one question, showing each turn"),
    "report": _on_runs("report", "write the HTML report of a run"),
    "compare": _on_runs("compare", "compare runs question by question"),
    "judge": _on_runs("judge", "judge a finished run with another judge, and print how far the two agree"),
    "explain": _on_runs("explain", "tell one row of a run from its folder alone"),
    "replay": _on_runs("replay", "run the environment again on recorded replies"),
    "inspect-row": _on_runs("inspect_row", "show a training row token by token"),
}

if __name__ == "__main__":
    sys.exit(main())
