"""`visor serve`: arguments, and the process that serves a corpus until it is told to stop."""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visor.http_serving import address_of, listen, run_until_signal
from visor.retrieval.service.limits import Limits

if TYPE_CHECKING:
    from visor.retrieval.peer_names import PeerImages
    from visor.retrieval.service.scoring import Scorer
    from visor.types import PageStore

HOST, PORT = "127.0.0.1", 8765
EXIT_OK, EXIT_FAILED = 0, 1


def serve_arguments(parser: argparse.ArgumentParser) -> None:
    limits = Limits()
    parser.add_argument("corpus", metavar="CORPUS")
    parser.add_argument(
        "--retriever", default="bm25", help="bm25 (default), dense, colqwen or hybrid:FIRST+SECOND"
    )
    parser.add_argument("--index", metavar="PATH", help="index folder (default: CORPUS/index/RETRIEVER)")
    parser.add_argument("--encoder", metavar="NAME", help="of the queries, where the model has moved")
    parser.add_argument("--device", help="of the encoder (default: a GPU if there is one)")
    parser.add_argument("--host", default=HOST, help=f"address to listen at (default: {HOST})")
    parser.add_argument("--port", type=int, default=PORT, help=f"0 takes a free one (default: {PORT})")
    parser.add_argument("--with-pages", action="store_true", help="serve page texts and images too")
    parser.add_argument(
        "--peer-protocol",
        action="store_true",
        help="answer /search as the servers of VRAG-RL and ViDoRAG do, with paths of page images",
    )
    parser.add_argument(
        "--peer-images",
        metavar="FOLDER",
        help="with --peer-protocol: make links there to the page images, named as the peers name them",
    )
    for option, default, help_text in (
        ("--max-body-bytes", limits.max_body_bytes, "size of a request"),
        ("--max-queries", limits.max_queries, "queries of a request"),
        ("--max-query-chars", limits.max_query_chars, "length of a query"),
        ("--max-top-k", limits.max_top_k, "pages of a query"),
        ("--max-waiting", limits.max_waiting, "queries that may wait; more are told to come back"),
        ("--max-batch", limits.max_batch, "queries scored at once"),
    ):
        parser.add_argument(
            option, type=int, default=default, metavar="N", help=f"{help_text} (default: {default})"
        )


def run_serve(arguments: argparse.Namespace, corpus: PageStore) -> int:
    """Serve `corpus` until SIGTERM or Ctrl-C; exit code 0 then. ValueError or OSError when it cannot."""
    from visor.retrieval.index import check_pages, check_retriever, default_index_path, open_index
    from visor.retrieval.opening import describe_index, is_remote
    from visor.retrieval.peer_names import PeerImages
    from visor.retrieval.service.scoring import Opened, Scorer

    names = ("max_body_bytes", "max_queries", "max_query_chars", "max_top_k", "max_waiting", "max_batch")
    for name in names:
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be 1 or more")
    limits = Limits(**{name: getattr(arguments, name) for name in names})
    if arguments.index and is_remote(arguments.index):
        raise ValueError(f"serve opens an index folder, and {arguments.index} is a service already")
    check_pages(corpus)
    check_retriever(arguments.retriever)
    path = Path(arguments.index or default_index_path(arguments.corpus, arguments.retriever))
    describe_index(path, arguments.retriever, corpus)  # a missing index is told before anything else starts
    if arguments.peer_images and not arguments.peer_protocol:
        raise ValueError("--peer-images goes with --peer-protocol")
    images = PeerImages(corpus, arguments.peer_images) if arguments.peer_protocol else None
    with listen(arguments.host, arguments.port) as listener:
        pages_too = " and read its pages" if arguments.with_pages else ""
        url = address_of(listener, f"search this corpus{pages_too}")
        print(f"opening the index {path}", file=sys.stderr, flush=True)

        def open_retriever() -> Opened:
            given = {name: getattr(arguments, name) for name in ("encoder", "device")}
            options = {name: value for name, value in given.items() if value is not None}
            retriever = open_index(path, corpus, arguments.retriever, **options)
            return Opened(retriever, describe_index(path, arguments.retriever))

        def announce() -> None:
            pages = f"{len(corpus.pages())} pages"
            print(f"serving {arguments.corpus} ({pages}, {arguments.retriever}) at {url}")
            print(f"fingerprint {scorer.fingerprint}", flush=True)

        scorer = Scorer(open_retriever, limits, on_ready=announce)
        _serve(scorer, corpus, listener, arguments.with_pages, images)
    if scorer.failure is not None:
        raise scorer.failure
    print("stopped", file=sys.stderr)
    return EXIT_OK


def _serve(
    scorer: Scorer, corpus: PageStore, listener: socket.socket, with_pages: bool, images: PeerImages | None
) -> None:
    """Run the event loop until a signal, or until the index turns out not to open."""

    def start(server: Any) -> None:
        def give_up() -> None:
            server.should_exit = True

        scorer.on_failure = give_up
        scorer.start()

    try:
        from visor.retrieval.service.app import create_app

        run_until_signal(create_app(scorer, corpus, with_pages, images), listener, start)
    except ImportError as error:
        raise ValueError(
            f"visor serve needs {error.name}; install it: pip install 'visor-rag[serve]'"
        ) from None
