"""An evaluation whose endpoint fails 30 % of the time, and which is killed again and again.

500 questions; a model and a judge at one HTTP server answer 429, 500, garbage or nothing; `kill -9` at random
moments. No row may be lost, stand twice or be wrong in silence.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rollout.evaluate import EvaluateConfig, evaluate
from rollout.recorder import read_lines
from visor.types import Question

pytest.importorskip("openai")

QUESTIONS = 500
WORDS = ("apple", "banana", "cherry", "damson")
FAULT_RATE = 0.3
LASTING = {("policy", 4): "no json", ("judge", 7): "no verdict"}
KINDS = ("429", "500", "no json", "no completion", "no choice", "dropped")
ROOT = Path(__file__).parents[2]


class FlakyServer(ThreadingHTTPServer):
    """An OpenAI-compatible endpoint of the models `policy` and `judge`; replies follow from the request."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        self.fault_rate = 0.0
        self.faults = Counter()
        self.random = random.Random(7)
        self.lock = threading.Lock()

    def next_fault(self, model: str, number: int) -> str:
        """What goes wrong with this call about a question; "" = nothing.

        Of every ten questions, one gets no reply of the model that can be read, and one no verdict, so that
        some fail beyond all retries; the calls about the others fail at random.
        """
        with self.lock:
            if not self.fault_rate:
                return ""
            if (model, number % 10) in LASTING:
                return LASTING[model, number % 10]
            if self.random.random() >= self.fault_rate:
                return ""
            kind = self.random.choice((*KINDS, "no verdict") if model == "judge" else KINDS)
            self.faults[model, kind] += 1
            return kind

    def handle_error(self, request, client_address):
        """A killed client leaves broken connections: nothing to say about."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reply = {"policy": policy_reply, "judge": judge_reply}[body["model"]](body["messages"])
        match self.server.next_fault(body["model"], asked(body["messages"][1]["content"])[0]):
            case "":
                self.send(200, completion(reply))
            case "429" | "500" as status:
                self.send(int(status), {"error": {"message": "not now"}})
            case "no json":
                self.send(200, b"<html>gateway</html>")
            case "no completion":
                self.send(200, json.dumps(completion(reply)).encode()[:-20])
            case "no choice":
                self.send(200, {"id": "1", "object": "chat.completion", "choices": []})
            case "no verdict":
                self.send(200, completion("I cannot say"))
            case "dropped":
                self.close_connection = True

    def send(self, status: int, payload) -> None:
        data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Retry-After-Ms", "20")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        """Quiet."""


def completion(text):
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


def asked(text: str) -> tuple[int, str]:
    """Number and word of the question "shade 17 of apple ?" inside a text."""
    words = text.split("shade ", 1)[1].split()
    return int(words[0]), words[2]


def policy_reply(messages) -> str:
    """Search the fruit, then answer with it and the number of the question."""
    number, word = asked(messages[1]["content"])
    if len(messages) == 2:
        return f"<think>find {word}</think><search>{word}</search>"
    return f"<think>it says so</think><answer>{word} {number}</answer>"


def judge_reply(messages) -> str:
    number, _ = asked(messages[1]["content"])
    return f"<judge>{number % 3 > 0}</judge>"


@pytest.fixture
def server():
    server = FlakyServer()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def arguments(world, server, tmp_path):
    """Of a run, but for its output."""
    from data.corpus import Corpus

    pages = [page.page_id for page in Corpus.open(world.corpus).pages()]
    questions = [
        Question(
            question_id=f"q{number}",
            text=f"shade {number} of {WORDS[number % 4]} ?",
            gold_answers=[f"{WORDS[number % 4]} {number}"],
            gold_page_ids=[pages[number % 4]],
        )
        for number in range(QUESTIONS)
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(question.model_dump_json() + "\n" for question in questions))
    return {
        "corpus": str(world.corpus),
        "benchmark": f"questions:{path}",
        "model": f"openai:policy@{server.url}",
        "judge": f"openai:judge@{server.url}",
        "episode": {"prompts": "tiny", "max_turns": 3},
    }


def rows_of(folder: Path) -> dict[str, dict]:
    """The result rows by question without their times; no question may stand twice in either file."""
    for name in ("trajectories.jsonl", "results.jsonl"):
        ids = [record["question_id"] for record in read_lines(folder / name)]
        assert len(ids) == len(set(ids))
    return {row["question_id"]: row | {"seconds": None} for row in read_lines(folder / "results.jsonl")}


def failed(row: dict) -> bool:
    return bool(row["error"]) or (row["verdict"] is None and "judge fault" in row["unscored_reason"])


class Command:
    """`python -m rollout.evaluate` as a process of its own."""

    def __init__(self, config: Path, output: Path, retry_failed: bool):
        options = ["--config", str(config), "--output", str(output), "--retry_failed", str(retry_failed)]
        self.output = output
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rollout.evaluate", *options],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def kill_after(self, rows: int) -> bool:
        """kill -9 when so many rows have been added; False when the command ended before."""
        start = self.lines()
        while self.process.poll() is None:
            if self.lines() - start >= rows:
                self.process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.002)
        self.process.communicate()
        return self.process.returncode == -signal.SIGKILL

    def finish(self) -> str:
        """Wait for the end; what it said on the standard error."""
        _, said = self.process.communicate(timeout=150)
        assert self.process.returncode == 0, said
        return said

    def lines(self) -> int:
        path = self.output / "trajectories.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
def test_a_faulty_endpoint_and_kills_lose_and_falsify_nothing(arguments, server, tmp_path):
    right = tmp_path / "right"
    metrics = evaluate(EvaluateConfig(**arguments, output=str(right)))
    expected = rows_of(right)
    assert (metrics["n"], metrics["failed"], metrics["unjudged"]) == (QUESTIONS, 0, 0)
    assert metrics["accuracy"] == sum(number % 3 > 0 for number in range(QUESTIONS)) / QUESTIONS

    config, output = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text(json.dumps(arguments))
    server.fault_rate = FAULT_RATE
    moments = random.Random(11)
    kills = sum(Command(config, output, False).kill_after(moments.randint(1, 200)) for _ in range(3))
    assert kills == 3
    said = Command(config, output, False).finish()
    found = rows_of(output)
    assert found.keys() == expected.keys()
    bad = {question_id for question_id, row in found.items() if failed(row)}
    faults = sum(bool(row["error"]) for row in found.values())
    assert 2 * QUESTIONS / 10 <= len(bad) < QUESTIONS / 3
    assert {q: row for q, row in found.items() if q not in bad} == {
        q: row for q, row in expected.items() if q not in bad
    }
    stored = json.loads((output / "metrics.json").read_text())
    assert (stored["n"], stored["failed"], stored["unjudged"]) == (QUESTIONS, faults, len(bad) - faults)
    assert "× fault: policy:" in said
    assert "some rows failed; the same command asks and judges them again" in said
    for model in ("policy", "judge"):
        assert all(server.faults[model, kind] for kind in KINDS), server.faults

    # One flag asks the failed ones again; killed and faulty once more, it must still do no harm.
    Command(config, output, True).kill_after(max(1, faults // 3))
    Command(config, output, True).finish()
    fewer = {question_id for question_id, row in rows_of(output).items() if failed(row)}
    assert 2 * QUESTIONS / 10 <= len(fewer) < QUESTIONS / 3
    server.fault_rate = 0.0
    Command(config, output, True).finish()
    assert rows_of(output) == expected
    assert json.loads((output / "metrics.json").read_text())["accuracy"] == metrics["accuracy"]
