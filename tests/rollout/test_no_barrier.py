"""Episodes on an endpoint go on as their replies come: none waits for the turn of another."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from PIL import Image

from rewards.judge import RuleJudge
from rollout.engine import EpisodeJob, RolloutEngine
from visor.env.config import EpisodeConfig
from visor.env.prompts import load_prompts
from visor.models.base import Sampling
from visor.models.openai import OpenAIClient
from visor.retrieval.bm25 import BM25Retriever
from visor.systems.visor import VisorSystem
from visor.types import Page, Question

EPISODES = 8


class Endpoint:
    """An HTTP endpoint that holds back the first reply to the question `slow` until every other episode has
    its answer."""

    def __init__(self):
        self.answered, self.order = threading.Semaphore(0), []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                text = endpoint.reply(body["messages"])
                message = {"role": "assistant", "content": text}
                choice = {"index": 0, "finish_reason": "stop", "message": message}
                reply = {
                    "id": "1",
                    "object": "chat.completion",
                    "created": 1,
                    "model": "m",
                    "choices": [choice],
                }
                payload = json.dumps(reply).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *args):
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def reply(self, messages) -> str:
        slow = "slow" in json.dumps(messages)
        turns = sum(message["role"] == "assistant" for message in messages)
        if slow and not turns:
            for _ in range(EPISODES - 1):
                assert self.answered.acquire(timeout=20), "the others wait for the slow episode"
        self.order.append("slow" if slow else "fast")
        if turns < 2:
            return f"<think>look for it</think><search>page {turns + 1}</search>"
        if not slow:
            self.answered.release()
        return "<think>found it</think><answer>yes</answer>"


@pytest.fixture
def endpoint():
    started = Endpoint()
    yield started
    started.server.shutdown()
    started.server.server_close()


def test_a_slow_episode_holds_up_no_other(endpoint, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    fields = {"doc_id": "d", "image": "p.png", "width": 280, "height": 280}
    pages = [Page(page_id=f"d#page={n}", page_number=n, text=f"page {n}", **fields) for n in range(1, 4)]
    client = OpenAIClient("m", endpoint.url, images=lambda ref: Image.new("RGB", (280, 280)))
    system = VisorSystem(
        client, BM25Retriever.build(pages), lambda page_id: (280, 280), EpisodeConfig(prompts="tiny"),
        load_prompts("tiny"), Sampling(),
    )  # fmt: skip
    names = ["slow", *(f"fast {n}" for n in range(1, EPISODES))]
    finished = []
    jobs = [EpisodeJob(Question(question_id=name, text=f"{name} ?", gold_answers=["yes"])) for name in names]
    engine = RolloutEngine(system, RuleJudge(), max_concurrency=EPISODES)
    trajectories = engine.run(jobs, lambda job, trajectory: finished.append(job.question.question_id))
    assert [(t.answer, len(t.turns), t.error) for t in trajectories] == [("yes", 3, None)] * EPISODES
    assert finished[-1] == "slow"
    assert endpoint.order == ["fast"] * 3 * (EPISODES - 1) + ["slow"] * 3
