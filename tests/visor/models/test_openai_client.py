"""The endpoint client against a small HTTP server: what is sent, tried again, and refused."""

import asyncio
import base64
import io
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from models_support import chat, page_image, page_ref, user
from PIL import Image

openai = pytest.importorskip("openai")

from visor.models.base import ContextTooLong, Request, Sampling, TooManyImages  # noqa: E402
from visor.models.loading import make_client  # noqa: E402
from visor.models.openai import MalformedReply, OpenAIClient, is_unreachable  # noqa: E402
from visor.models.smart_resize import smart_resize  # noqa: E402
from visor.types import FinishReason, text_message  # noqa: E402


class Endpoint:
    """Answers with the given (status, body) replies in turn, then the last one; keeps what it was sent."""

    def __init__(self, *replies):
        self.replies, self.received, self.keys = list(replies), [], []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                endpoint.received.append(json.loads(body))
                endpoint.keys.append(self.headers["Authorization"])
                number = min(len(endpoint.received), len(endpoint.replies)) - 1
                status, reply = endpoint.replies[number]
                payload = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *args):
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def endpoint():
    started = []

    def start(*replies) -> Endpoint:
        started.append(Endpoint(*replies))
        return started[-1]

    yield start
    for item in started:
        item.server.shutdown()
        item.server.server_close()


def answer(text="hello", finish="stop"):
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": finish, "message": message}
    return 200, {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        ({"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}, (12, 3)),
        ({"prompt_tokens": 12}, (12, None)),
        ({"prompt_tokens": "many", "completion_tokens": -1}, (None, None)),
        (None, (None, None)),
    ],
)
def test_the_tokens_that_an_endpoint_counts(endpoint, monkeypatch, usage, counted):
    monkeypatch.setenv("OPENAI_API_KEY", "k-1")
    status, body = answer()
    server = endpoint((status, body | {"usage": usage}))
    completion = ask(make_client(f"openai:m@{server.url}", images=page_image), chat(user("q")))
    assert (completion.prompt_tokens, completion.completion_tokens) == counted


def refusal(message, status=400):
    return status, {"error": {"message": message, "type": "invalid_request_error"}}


def ask(client, messages, **sampling):
    return asyncio.run(client.complete(Request(messages, seed=11, sampling=Sampling(**sampling))))


def test_what_is_sent_and_read(endpoint, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k-1")
    server = endpoint(answer("<answer>4</answer>", "length"))
    client = make_client(f"openai:teacher@{server.url}", images=page_image)
    ref = page_ref("c", budget=9)
    reply = text_message("assistant", "<search>x</search>")
    completion = ask(
        client, chat(user("q", ref), reply, user("go on")), temperature=0.25, top_p=0.9, max_tokens=5
    )
    assert completion.text == "<answer>4</answer>"
    assert completion.finish_reason == FinishReason.LENGTH
    assert completion.token_ids is None
    assert completion.logprobs is None
    assert completion.model == "teacher"
    expected = smart_resize(60, 300, min_pixels=ref.min_pixels, max_pixels=ref.max_pixels)
    assert completion.image_sizes == [expected]
    (sent,) = server.received
    assert server.keys == ["Bearer k-1"]
    assert (sent["model"], sent["temperature"], sent["top_p"], sent["max_tokens"], sent["seed"]) == (
        "teacher", 0.25, 0.9, 5, 11,
    )  # fmt: skip
    assert [message["role"] for message in sent["messages"]] == ["system", "user", "assistant", "user"]
    assert sent["messages"][2]["content"] == "<search>x</search>"
    text, image = sent["messages"][1]["content"]
    assert text == {"type": "text", "text": "q"}
    head, data = image["image_url"]["url"].split(",")
    assert head == "data:image/jpeg;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == expected


def test_a_lone_surrogate_can_be_sent_back(endpoint):
    server = endpoint(answer("half \ud83d"), answer())
    client = OpenAIClient("m", server.url, page_image)
    reply = ask(client, chat(user("q")))
    assert reply.text == "half ?"
    ask(client, chat(user("q"), text_message("assistant", reply.text), user("go on")))
    assert server.received[1]["messages"][-2]["content"] == "half ?"


def test_transient_errors_are_tried_again_with_growing_waits(endpoint, monkeypatch):
    server = endpoint(refusal("busy", 503), refusal("slow down", 429), answer())
    waits = []

    async def sleep(seconds, *args):
        waits.append(seconds)

    client = OpenAIClient("m", server.url, page_image)
    import anyio

    monkeypatch.setattr(anyio, "sleep", sleep)
    assert ask(client, chat(user("q"))).text == "hello"
    assert len(server.received) == 3
    assert len(waits) == 2
    assert 0 < waits[0] < waits[1]


def unused_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_errors_of_the_connection_name_the_address():
    address = f"127.0.0.1:{unused_port()}/v1"
    client = OpenAIClient("m", f"http://user:secret@{address}?key=secret", page_image, max_retries=0)
    with pytest.raises(openai.APIConnectionError, match=f"Connection error at http://{address}") as caught:
        ask(client, chat(user("q")))
    assert "secret" not in str(caught.value)
    assert is_unreachable(caught.value)


def test_a_reply_that_takes_too_long_names_the_address_but_the_endpoint_is_there():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        client = OpenAIClient("m", address, page_image, max_retries=0, timeout=0.2)
        with pytest.raises(openai.APITimeoutError, match=f"timed out at {address}") as caught:
            ask(client, chat(user("q")))
    assert not is_unreachable(caught.value)


def test_retries_end(endpoint):
    server = endpoint(refusal("down", 500))
    with pytest.raises(openai.InternalServerError):
        ask(OpenAIClient("m", server.url, page_image, max_retries=1), chat(user("q")))
    assert len(server.received) == 2


@pytest.mark.parametrize(
    ("status", "message", "error"),
    [
        (401, "bad key", openai.AuthenticationError),
        (404, "no such model", openai.NotFoundError),
        (400, "temperature must be positive", openai.BadRequestError),
        (400, "This model's maximum context length is 4096 tokens", ContextTooLong),
        (400, "At most 2 image(s) may be provided in one prompt.", TooManyImages),
    ],
)
def test_refusals_are_final_and_keep_their_meaning(status, message, error, endpoint):
    server = endpoint(refusal(message, status))
    with pytest.raises(error, match=message.split()[-1]):
        ask(OpenAIClient("m", server.url, page_image), chat(user("q")))
    assert len(server.received) == 1


def test_own_image_limit_asks_nothing(endpoint):
    server = endpoint(answer())
    client = OpenAIClient("m", server.url, page_image, max_images=1)
    with pytest.raises(TooManyImages, match="2 images"):
        ask(client, chat(user(page_ref("a"), page_ref("b"))))
    assert server.received == []


def test_no_key_and_many_calls_over_two_event_loops(endpoint, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server = endpoint(answer())
    client = OpenAIClient("m", server.url, page_image)

    async def many():
        requests = [Request(chat(user("q")), seed=i) for i in range(5)]
        return await asyncio.gather(*map(client.complete, requests))

    assert len(asyncio.run(many())) == len(asyncio.run(many())) == 5
    assert sorted(sent["seed"] for sent in server.received) == sorted([*range(5), *range(5)])


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"choices": []},
        {"choices": None},
        {"choices": [{}]},
        {"choices": [{"message": {"content": 5}}]},
        [1],
        "text",
    ],
)
def test_a_reply_that_is_no_completion_is_an_error_that_says_so(body, endpoint):
    client = make_client(f"openai:m@{endpoint((200, body)).url}", max_retries=0)
    with pytest.raises(MalformedReply, match="m answered with something that is no"):
        ask(client, [text_message("user", "Q?")])


def test_a_malformed_reply_is_asked_for_again_a_few_times(endpoint, monkeypatch):
    monkeypatch.setattr("visor.models.openai.MALFORMED_WAIT", 0.01)
    server = endpoint((200, {}), (200, "x"), answer("hello"))
    assert ask(make_client(f"openai:m@{server.url}"), [text_message("user", "Q?")]).text == "hello"
    lasting = endpoint((200, {}))
    with pytest.raises(MalformedReply):
        ask(make_client(f"openai:m@{lasting.url}"), [text_message("user", "Q?")])
    assert len(lasting.received) == 3


def test_an_empty_reply_is_a_reply(endpoint):
    client = make_client(f"openai:m@{endpoint(answer(None)).url}")
    assert ask(client, [text_message("user", "Q?")]).text == ""
