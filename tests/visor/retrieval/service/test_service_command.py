"""`visor serve` as users start and stop it."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx2
import pytest

from data.corpus import Corpus
from visor.cli import main
from visor.retrieval.index import default_index_path
from visor.retrieval.service.process import ServiceProcess

BODY = {"queries": [{"id": "q", "text": "red"}]}


def test_sigterm_and_ctrl_c_end_it_cleanly(corpus):
    for number in (signal.SIGTERM, signal.SIGINT):
        service = ServiceProcess(corpus.path)
        with httpx2.Client(trust_env=False) as client:
            assert client.post(service.url + "/v1/search", json=BODY).status_code == 200
            service.process.send_signal(number)
            assert service.process.wait(20) == 0
        assert service.errors().splitlines()[-1] == "stopped"
        assert "Traceback" not in service.errors()


def test_a_request_under_way_is_answered_before_the_end(corpus):
    service = ServiceProcess(corpus.path)
    body = json.dumps(BODY).encode()
    head = f"POST /v1/search HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", service.port), timeout=10) as connection:
        connection.sendall(head + body[:10])
        while not httpx2.get(service.url + "/healthz", trust_env=False).is_success:
            pass
        service.process.send_signal(signal.SIGTERM)
        connection.sendall(body[10:])
        reply = connection.recv(65536)
    assert reply.startswith(b"HTTP/1.1 200")
    assert service.process.wait(20) == 0


@pytest.mark.slow
def test_the_port_is_taken_back_after_a_kill(corpus):
    first = ServiceProcess(corpus.path)
    with httpx2.Client(trust_env=False) as client:
        client.get(first.url + "/healthz")
        first.kill()
        with ServiceProcess(corpus.path, port=first.port) as second:
            assert second.url == first.url
            assert second.fingerprint == first.fingerprint
            assert client.get(second.url + "/readyz").status_code == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--index", "nowhere"], "nowhere holds no index; make one with `visor index"),
        (["--retriever", "bm52"], "unknown retriever 'bm52'"),
        (["--index", "http://localhost:1"], "is a service already"),
        (["--max-queries", "0"], "--max-queries must be 1 or more"),
        (["--host", "203.0.113.7"], "cannot listen at 203.0.113.7:0"),
        (["--port", "99999"], "cannot listen at 127.0.0.1:99999"),
        (["--peer-images", "x"], "--peer-images goes with --peer-protocol"),
    ],
)
def test_mistakes_end_with_a_sentence(corpus, capsys, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    assert main(["serve", str(corpus.path), "--port", "0", *options]) == 2
    captured = capsys.readouterr().err
    assert message in captured
    assert "Traceback" not in captured


def test_a_taken_port_and_an_index_of_another_corpus(corpus, tmp_path, capsys):
    import shutil

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(corpus.path), "--port", str(port)]) == 2
    assert f"cannot listen at 127.0.0.1:{port}" in capsys.readouterr().err
    shutil.copytree(corpus.path, tmp_path / "other")
    from data.corpus_files import read_corpus, write_corpus

    documents, pages = read_corpus(tmp_path / "other")
    pages.popitem()
    write_corpus(tmp_path / "other", documents, pages)
    assert len(Corpus.open(tmp_path / "other").pages()) == 7
    index = str(default_index_path(corpus.path))
    assert main(["serve", str(tmp_path / "other"), "--port", "0", "--index", index]) == 2
    error = capsys.readouterr().err
    assert "was made for corpus 'corpus' with 8 pages" in error


def test_elsewhere_than_loopback_is_warned_of(corpus, service):
    assert "warning" not in service.errors()
    with ServiceProcess(corpus.path, "--host", "0.0.0.0", "--with-pages") as open_to_all:
        assert "warning: 0.0.0.0 can be reached from other machines" in open_to_all.errors()
        assert "read its pages" in open_to_all.errors()
        assert httpx2.get(f"http://127.0.0.1:{open_to_all.port}/readyz", trust_env=False).status_code == 200


def test_without_the_extra_the_message_says_what_to_install(corpus):
    code = """
import sys
sys.modules["uvicorn"] = None
from visor.cli import main
sys.exit(main(["serve", sys.argv[1], "--port", "0"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(corpus.path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "pip install 'visor-rag[serve]'" in done.stderr


def test_slow_clients_block_nobody(service):
    """Twenty clients that send half a request; a twenty-first is answered at once."""
    half = b"POST /v1/search HTTP/1.1\r\nHost: x\r\nContent-Length: 60\r\n\r\n{"
    slow = [socket.create_connection(("127.0.0.1", service.port)) for _ in range(20)]
    for connection in slow:
        connection.sendall(half)
    response = httpx2.post(service.url + "/v1/search", json=BODY, trust_env=False, timeout=5)
    assert response.status_code == 200
    for connection in slow:
        connection.close()


def test_vanished_and_slow_clients_of_a_busy_service(corpus, tmp_path):
    """The service over a retriever that can be held: a client goes, and its query is never scored; a body
    that does not arrive is given up."""
    import uvicorn

    from visor.retrieval.base import ScoredPage
    from visor.retrieval.service.app import create_app
    from visor.retrieval.service.limits import Limits
    from visor.retrieval.service.scoring import Opened, Scorer

    gate, entered, batches = threading.Event(), threading.Event(), []
    gate.set()

    class Held:
        name = "held"

        def search(self, query, k):
            return []

        def search_batch(self, queries):
            batches.append([query.text for query in queries])
            entered.set()
            assert gate.wait(20)
            return [[ScoredPage("fruit.pdf#page=1", 1.0)] for _ in queries]

    scorer = Scorer(lambda: Opened(Held(), {"retriever": "held"}), Limits(body_seconds=0.2))
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(create_app(scorer, corpus), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    scorer.start()
    thread.start()

    def send(text):
        body = json.dumps({"queries": [{"id": "q", "text": text}]}).encode()
        connection = socket.create_connection(("127.0.0.1", port), timeout=10)
        head = f"POST /v1/search HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        return connection

    while scorer.state != "ready":
        time.sleep(0.01)
    gate.clear()
    entered.clear()
    batches.clear()
    first = send("first")
    assert entered.wait(10)
    gone, stays = send("gone"), send("stays")
    while len(scorer._jobs) < 2:
        time.sleep(0.01)
    gone.close()
    while not any(job.future.cancelled() for job in scorer._jobs):
        time.sleep(0.01)
    gate.set()
    assert first.recv(4096).startswith(b"HTTP/1.1 200")
    assert stays.recv(4096).startswith(b"HTTP/1.1 200")
    assert batches == [["first"], ["stays"]]
    with socket.create_connection(("127.0.0.1", port), timeout=10) as slow:
        slow.sendall(b"POST /v1/search HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        assert slow.recv(4096).startswith(b"HTTP/1.1 408")
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()
