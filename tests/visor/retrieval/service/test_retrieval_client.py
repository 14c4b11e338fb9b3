"""The client against real servers: ours, one that stumbles as told, and one that dies and comes back."""

import itertools
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from visor.retrieval.base import Query, ScoredPage
from visor.retrieval.client import RetrievalClient, RetrievalError
from visor.retrieval.fingerprint import retriever_fingerprint
from visor.retrieval.index import build_index, default_index_path, open_index
from visor.retrieval.opening import open_remote
from visor.retrieval.service.process import ServiceProcess


@pytest.fixture
def client(service, corpus):
    with RetrievalClient(service.url, pages=corpus.pages(), budget=10) as client:
        yield client


def test_it_is_the_retriever_in_process(client, retriever, service):
    assert (client.name, client.fingerprint) == (retriever.name, service.fingerprint)
    assert retriever_fingerprint(client) == retriever_fingerprint(retriever) == service.fingerprint[:16]
    queries = [
        Query("red sweet", 10),
        Query("", 3),
        Query("red", 10, frozenset({"fruit.pdf#page=1"})),
        Query("red", 10, doc_ids=frozenset({"animals.pdf", "none.pdf"})),
        Query("red", 10, doc_ids=frozenset()),
        Query("red", 0),
        Query("red\ud83dfox", 2),
        Query("red\x00fox", 2),
        Query("营业收入", 1),
    ]
    expected = retriever.search_batch(queries)
    assert client.search_batch(queries) == expected
    assert client.search_batch(queries * 9) == expected * 9, "more than the service takes at once"
    assert client.search_batch([]) == []
    assert client.search("red", 2) == retriever.search("red", 2)
    with pytest.raises(ValueError, match="k must be 0 or more"):
        client.search("red", -1)


def test_case_f6_parallel_requests_each_get_their_own(client, retriever):
    texts = ["red", "blue", "sweet", "small", "chart", "fox", "hen", "banana"]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda text: client.search(text, 5), texts * 20))
    assert found == [retriever.search(text, 5) for text in texts * 20]


def test_another_corpus_or_fingerprint_is_refused_at_connecting(service, corpus):
    with pytest.raises(
        ValueError, match=r"serves the corpus 'corpus' with 8 pages, which is not .* \(7 pages\)"
    ):
        RetrievalClient(service.url, pages=corpus.pages()[1:])
    with pytest.raises(ValueError, match=r"has the fingerprint .*, expected 0123"):
        RetrievalClient(service.url, expect_fingerprint="0123")
    RetrievalClient(service.url, expect_fingerprint=service.fingerprint[:16]).close()
    for url in ("ftp://x", "http://", "localhost:8765"):
        with pytest.raises(ValueError, match="no address of a search service"):
            RetrievalClient(url)


def test_a_refusal_is_not_tried_again(client):
    started = time.monotonic()
    with pytest.raises(
        RetrievalError, match=r"refused the request \(422\): queries\[0\].top_k is 5000"
    ) as error:
        client.search("red", 5000)
    assert error.value.status == 422
    assert time.monotonic() - started < 5


def test_an_index_that_changes_is_an_error_in_words(corpus, tmp_path):
    import shutil

    from data.corpus import Corpus
    from data.corpus_files import read_corpus, write_corpus

    copy = tmp_path / "corpus"
    shutil.copytree(corpus.path, copy)
    with ServiceProcess(copy) as first:
        client = RetrievalClient(first.url, budget=20)
        assert client.search("red", 1)
        first.kill()
        documents, pages = read_corpus(copy)
        pages["fruit.pdf#page=1"].text = "nothing"
        write_corpus(copy, documents, pages)
        build_index(Corpus.open(copy), default_index_path(copy))
        with (
            ServiceProcess(copy, port=first.port),
            pytest.raises(RetrievalError, match=r"has changed since the connection.*not.*another index"),
        ):
            client.search("red", 1)
        client.close()


def test_a_closed_client_says_so(service):
    client = RetrievalClient(service.url)
    client.close()
    with pytest.raises(RetrievalError, match="is closed"):
        client.search("red", 1)


def test_nobody_there():
    with pytest.raises(
        RetrievalError, match=r"http://127.0.0.1:9 did not answer within 0.5 s \(. tries\).*Connect"
    ):
        RetrievalClient("http://127.0.0.1:9", connect_budget=0.5)


# ---------------------------------------------------------------- a server that stumbles


class Stumbling(ThreadingHTTPServer):
    """Answers as told, one (status, headers, body) after another, then well; None drops the connection."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = []
        self.times = []
        self.page_id = "fruit.pdf#page=1"
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        version = {
            "retriever": {"name": "bm25"},
            "fingerprint": "b-i",
            "limits": {"max_queries": 5},
            "corpus_hash": None,
            "corpus": "c",
            "page_count": 1,
        }
        self.reply(200, {}, json.dumps(version).encode())

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.times.append(time.monotonic())
        step = self.server.script.pop(0) if self.server.script else "well"
        if step is None:
            self.close_connection = True
            return
        if step == "well":
            hits = [{"page_id": self.server.page_id, "score": 1.0}]
            results = [{"id": q["id"], "hits": hits} for q in reversed(asked["queries"])]
            step = (200, {}, json.dumps({"results": results}).encode())
        self.reply(*step)

    def reply(self, status, headers, body):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def stumbling():
    server = Stumbling()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


WELL = [ScoredPage("fruit.pdf#page=1", 1.0)]


def test_passing_trouble_is_tried_again_with_growing_waits(stumbling):
    stumbling.script = [(503, {}, b"busy"), None, (502, {}, b""), (504, {}, b"")]
    with RetrievalClient(stumbling.url, budget=30) as client:
        assert client.search("x", 1) == WELL
        waits = [client._session._growing_wait(tries) for tries in range(1, 9)]
    assert len(stumbling.times) == 5
    assert all(later > earlier for earlier, later in itertools.pairwise(waits[:6])), waits
    assert 6 <= waits[-1] <= 10


def test_retry_after_is_honoured(stumbling):
    stumbling.script = [(429, {"Retry-After": "1"}, b'{"detail": "full"}')]
    with RetrievalClient(stumbling.url, budget=30) as client:
        assert client.search("x", 1) == WELL
    assert stumbling.times[1] - stumbling.times[0] >= 1.0
    stumbling.script = [(429, {"Retry-After": "100"}, b'{"detail": "full"}')]
    with (
        RetrievalClient(stumbling.url, budget=2) as client,
        pytest.raises(RetrievalError, match=r"within 2 s \(one try\); the last time: 429, full"),
    ):
        client.search("x", 1)


@pytest.mark.parametrize("status", [400, 401, 404, 409, 413, 422, 500, 501, 301])
def test_other_statuses_are_errors_at_once(stumbling, status):
    stumbling.script = [(status, {"Location": "http://x"}, b'{"detail": "the reason"}')]
    with (
        RetrievalClient(stumbling.url) as client,
        pytest.raises(RetrievalError, match=rf"\({status}\): the reason") as error,
    ):
        client.search("x", 1)
    assert error.value.status == status
    assert len(stumbling.times) == 1


@pytest.mark.parametrize(
    "body",
    [b"<html>", b"[]", b'{"results": []}', b'{"results": [{"id": "0", "hits": [{"page_id": "x"}]}]}', b""],
)
def test_replies_that_are_no_results_are_errors(stumbling, body):
    stumbling.script = [(200, {}, body)]
    with RetrievalClient(stumbling.url) as client, pytest.raises(RetrievalError, match="sent a reply that"):
        client.search("x", 1)


def test_a_page_of_another_corpus_is_an_error(stumbling, corpus):
    with RetrievalClient(stumbling.url, pages=corpus.pages()) as client:
        assert client.search("x", 1) == WELL
        stumbling.page_id = "strange.pdf#page=1"
        with pytest.raises(RetrievalError, match=r"returned the page 'strange.pdf#page=1', which the local"):
            client.search("x", 1)


def test_a_budget_that_is_spent_names_the_last_trouble(stumbling):
    stumbling.script = [(503, {}, b'{"detail": "the index is being opened."}')] * 50
    started = time.monotonic()
    with (
        RetrievalClient(stumbling.url, budget=1.5) as client,
        pytest.raises(RetrievalError, match=r"did not answer within 1.5 s .*503, the index is being opened"),
    ):
        client.search("x", 1)
    assert time.monotonic() - started < 10
    assert len(stumbling.times) >= 2


def test_closing_ends_a_search_that_waits(stumbling):
    stumbling.script = [(503, {"Retry-After": "50"}, b"")] * 50
    client = RetrievalClient(stumbling.url, budget=100)
    with ThreadPoolExecutor(1) as threads:
        search = threads.submit(client.search, "x", 1)
        while not stumbling.times:
            time.sleep(0.01)
        client.close()
        with pytest.raises(RetrievalError, match="is closed"):
            search.result(10)


def test_waits_do_not_touch_the_seeded_generator(stumbling):
    stumbling.script = [(503, {}, b"")]
    random.seed(7)
    expected = random.random()
    random.seed(7)
    with RetrievalClient(stumbling.url) as client:
        client.search("x", 1)
    assert random.random() == expected


def test_something_else_at_the_address(stumbling, monkeypatch):
    monkeypatch.setattr(Handler, "do_GET", lambda self: self.reply(200, {}, b'{"hello": 1}'))
    with pytest.raises(RetrievalError, match="answers, but not as `visor serve` does"):
        RetrievalClient(stumbling.url)
    monkeypatch.setattr(Handler, "do_GET", lambda self: self.reply(404, {}, b""))
    with pytest.raises(RetrievalError, match=r"is no `visor serve`; a peer's server is named peer\+http"):
        RetrievalClient(stumbling.url)


# ---------------------------------------------------------------- by address


def test_an_address_stands_for_an_index(service, corpus, retriever, capsys):
    from visor.cli import main

    opened = open_index(service.url, corpus)
    assert opened.search("red", 5) == retriever.search("red", 5)
    assert open_index(service.url, corpus, "bm25").name == "bm25"
    with pytest.raises(ValueError, match="ranks with 'bm25', not 'dense'"):
        open_index(service.url, corpus, "dense")
    with pytest.raises(ValueError, match="did not answer"):
        open_remote("http://127.0.0.1:9", corpus, connect_budget=0.3)
    assert main(["search", str(corpus.path), "red", "-k", "2"]) == 0
    local = capsys.readouterr().out
    assert main(["search", str(corpus.path), "red", "-k", "2", "--index", service.url]) == 0
    assert capsys.readouterr().out == local
