"""The model judge against a real HTTP endpoint that fails in every way of case G2, and its limits."""

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from reward_helpers import load_json

pytest.importorskip("openai")

from rewards.judge import ModelJudge
from rollout.build import JudgeOptions, make_judge
from visor.types import Completion

TIMEOUT = 0.5


class Endpoint:
    """Answers as the lines of case G2 say: `STATUS [text or header]` or `timeout`; the last line repeats."""

    def __init__(self, replies):
        self.replies, self.received = list(replies), []
        self.lock = threading.Lock()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with endpoint.lock:
                    endpoint.received.append((time.perf_counter(), json.loads(body)))
                    reply = endpoint.replies[min(len(endpoint.received), len(endpoint.replies)) - 1]
                if reply == "timeout":
                    time.sleep(3 * TIMEOUT)
                    return
                status, _, rest = reply.partition(" ")
                if status == "200":
                    choice = {"index": 0, "finish_reason": "stop",
                              "message": {"role": "assistant", "content": rest}}  # fmt: skip
                    payload = {"id": "1", "object": "chat.completion", "created": 1, "model": "m",
                               "choices": [choice]}  # fmt: skip
                else:
                    payload = {"error": {"message": f"refused with {status}"}}
                data = json.dumps(payload).encode()
                self.send_response(int(status))
                if rest.startswith("Retry-After:"):
                    self.send_header("Retry-After", rest.removeprefix("Retry-After:").strip())
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.spec = f"openai:judge@http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def calls(self) -> int:
        return len(self.received)


@pytest.fixture
def endpoint():
    started = []

    def start(*replies) -> Endpoint:
        started.append(Endpoint(replies))
        return started[-1]

    yield start
    for item in started:
        item.server.shutdown()
        item.server.server_close()


def judge_of(server, cache=None, **options):
    options = {"timeout": TIMEOUT, "max_retries": 2, **options}
    return make_judge(server.spec, options=JudgeOptions(cache=str(cache) if cache else None, **options))


@pytest.mark.parametrize("number", range(5))
def test_case_g2(number, endpoint, tmp_path):
    case = load_json("judge_http.json")[number]
    right = case["right"]
    server = endpoint(*case["replies"])
    cache = tmp_path / "judge.jsonl"
    judge = judge_of(server, cache)
    verdict = judge.verdict("Q?", ["12"], "12")
    calls = server.calls
    if right["verdict"] == "judge_error":
        assert verdict.value is None
        assert verdict.error
        assert judge.counts.failures == 1
        assert not cache.exists()  # no failure is kept as a verdict
        again = judge_of(server, cache)
        assert again.verdict("Q?", ["12"], "12").value is None
        assert server.calls > calls  # and the next run asks again
    else:
        assert verdict.value is right["verdict"]
        assert judge_of(server, cache).verdict("Q?", ["12"], "12").value is right["verdict"]
        assert server.calls == calls  # known from the file
    if "calls" in right:
        assert calls == right["calls"]
    assert calls <= right.get("calls_max", 20)
    if "waited_s_min" in right:
        assert server.received[1][0] - server.received[0][0] >= right["waited_s_min"]


def test_case_g3_reaches_the_endpoint_word_for_word(endpoint):
    case = load_json("judge_template.json")
    server = endpoint("200 <judge>False</judge>")
    judge = judge_of(server)
    assert judge.verdict(case["question"], [case["gold"]], case["answer"]).value is False
    ((_, sent),) = server.received
    text = "\n".join(message["content"] for message in sent["messages"])
    assert case["question"] in text
    assert case["answer"] in text
    assert text.count(case["gold"]) == 1
    for answer in ("", "  "):
        for gold in (case["gold"], "Not answerable"):
            assert judge.verdict(case["question"], [gold], answer).value is False
    assert server.calls == 1


def test_the_honesty_check_of_the_model_is_asked_and_kept_apart(endpoint, tmp_path):
    server = endpoint("200 <judge>False</judge>", "200 <judge>True</judge>")
    judge = judge_of(server, tmp_path / "judge.jsonl", honesty="model")
    assert judge.name == "model:judge+honesty"
    assert judge.verdict("Q?", ["12"], "not found").value is False
    assert judge.honest("Q?", "not found").value is True
    assert judge.verdict("Q?", ["12"], "not found").value is False
    assert judge.honest("Q?", "not found").value is True
    assert server.calls == 2


class Slow:
    """A client that answers when it is told to, and sees how many wait for it."""

    name = "slow"

    def __init__(self):
        self.running = self.peak = self.asked = 0
        self.go = None

    async def complete(self, request):
        self.go = self.go or asyncio.Event()
        self.asked += 1
        self.running += 1
        self.peak = max(self.peak, self.running)
        await self.go.wait()
        self.running -= 1
        return Completion(text="<judge>True</judge>")


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def test_no_more_than_so_many_calls_at_once():
    async def run():
        client = Slow()
        judge = ModelJudge(client, max_concurrency=3)
        asked = [asyncio.create_task(judge.averdict("Q?", ["12"], f"answer {i}")) for i in range(10)]
        await until(lambda: client.running == 3)
        client.go.set()
        assert all([(await task).value for task in asked])
        return client, judge

    client, judge = asyncio.run(run())
    assert (client.peak, client.asked, judge.counts.calls) == (3, 10, 10)


def test_the_same_answer_at_the_same_time_is_asked_once_and_survives_a_cancelled_waiter():
    async def run():
        client = Slow()
        judge = ModelJudge(client)
        asked = [asyncio.create_task(judge.averdict("Q?", ["12"], "twelve")) for _ in range(4)]
        await until(lambda: client.running == 1)
        asked[0].cancel()
        client.go.set()
        values = [(await task).value for task in asked[1:]]
        # The honesty check and another reference are other questions.
        assert (await judge.averdict("Q?", ["13"], "twelve")).value is True
        return client, judge, values

    client, judge, values = asyncio.run(run())
    assert values == [True] * 3
    assert (client.asked, judge.counts.calls, judge.counts.cached) == (2, 2, 3)
