"""Native tool calls and picture limits of the endpoint client, against a real HTTP server."""

import asyncio
import base64
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from models_support import chat, page_image, page_ref, user
from PIL import Image

openai = pytest.importorskip("openai")

from visor.models.base import ContextTooLong, Request, Tool, ToolsNotSupported, takes_tools  # noqa: E402
from visor.models.openai import OpenAIClient  # noqa: E402
from visor.models.openai_messages import PICTURES_FOLLOW  # noqa: E402
from visor.models.scripted import ScriptedClient  # noqa: E402
from visor.types import FinishReason, ImagePart, Message, TextPart, ToolCall, ToolResult  # noqa: E402

TOOL = Tool("search", "Look it up.", {"type": "object", "properties": {"query": {"type": "string"}}})


@pytest.fixture
def serve():
    servers = []

    def start(status, message):
        received = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                body = message
                if status == 200:
                    choice = {"index": 0, "finish_reason": "tool_calls", "message": message}
                    body = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
                    body["choices"] = [choice]
                payload = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *args):
                """Quiet."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}/v1", received

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(url, messages, tools=(TOOL,), **settings):
    client = OpenAIClient("m", url, page_image, max_retries=0, **settings)
    return asyncio.run(client.complete(Request(messages, seed=1, tools=tools)))


def calls_message(*functions):
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in functions
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def test_tools_are_offered_and_calls_read(serve):
    url, received = serve(
        200, calls_message(("c1", "search", '{"query": "x"}'), ("", "search", {"query": 2}))
    )
    completion = ask(url, chat(user("q")))
    assert completion.text == ""
    assert completion.finish_reason == FinishReason.STOP
    first, second = completion.tool_calls
    assert (first.call_id, first.name, first.arguments) == ("c1", "search", '{"query": "x"}')
    assert (second.call_id, json.loads(second.arguments)) == ("call_1", {"query": 2})
    assert received[0]["tools"] == [
        {
            "type": "function",
            "function": {"name": "search", "description": "Look it up.", "parameters": TOOL.parameters},
        }
    ]
    ask(url, chat(user("q")), tools=())
    assert "tools" not in received[1]


def test_a_call_can_be_required(serve):
    url, received = serve(200, calls_message(("c1", "search", "{}")))
    client = OpenAIClient("m", url, page_image, max_retries=0)
    for tools, must_call in (((TOOL,), True), ((TOOL,), False), ((), True)):
        asyncio.run(client.complete(Request(chat(user("q")), seed=1, tools=tools, must_call=must_call)))
    assert [body.get("tool_choice") for body in received] == ["required", None, None]


def test_calls_and_results_in_the_history(serve):
    url, received = serve(200, calls_message(("c", "search", "{}")))
    reply = Message(
        role="assistant",
        content=[
            TextPart(text="look"),
            ToolCall(call_id="c1", name="search", arguments='{"query": "x"}'),
            ToolCall(call_id="c2", name="search", arguments='{"query": '),
        ],
    )
    result = Message(
        role="tool",
        content=[
            ToolResult(call_id="c1"),
            TextPart(text="Picture 1:"),
            ImagePart(image=page_ref("a")),
            ToolResult(call_id="c2"),
            TextPart(text="not carried out"),
        ],
    )
    completion = ask(url, chat(user("q"), reply, result))
    _, _, sent_reply, first, second, pictures = received[0]["messages"]
    assert sent_reply["content"] == "look"
    assert [call["id"] for call in sent_reply["tool_calls"]] == ["c1", "c2"]
    assert [call["function"]["arguments"] for call in sent_reply["tool_calls"]] == ['{"query": "x"}', "{}"]
    assert first == {"role": "tool", "tool_call_id": "c1", "content": PICTURES_FOLLOW}
    assert second == {"role": "tool", "tool_call_id": "c2", "content": "not carried out"}
    assert pictures["role"] == "user"
    assert [part["type"] for part in pictures["content"]] == ["text", "image_url"]
    assert len(completion.image_sizes) == 1


@pytest.mark.parametrize(
    ("status", "message", "error"),
    [
        (400, '"auto" tool choice requires --enable-auto-tool-choice', ToolsNotSupported),
        (404, "No endpoints found that support tool use", ToolsNotSupported),
        (422, "tools: extra fields not permitted", ToolsNotSupported),
        (400, "maximum context length is 9 tokens, tools included", ContextTooLong),
        (400, "temperature must be positive", openai.BadRequestError),
        (401, "this key may not use tools", openai.AuthenticationError),
    ],
)
def test_what_a_refusal_means(serve, status, message, error):
    url, received = serve(status, {"error": {"message": message}})
    with pytest.raises(error):
        ask(url, chat(user("q")))
    assert len(received) == 1


def test_a_refusal_that_speaks_of_tools_is_none_of_them_without_tools(serve):
    url, _ = serve(400, {"error": {"message": "unknown tool role"}})
    with pytest.raises(openai.BadRequestError):
        ask(url, chat(user("q")), tools=())


def test_pictures_are_counted_and_kept_under_the_limit(serve):
    url, received = serve(200, calls_message())
    noise = Image.effect_noise((280, 280), 90).convert("RGB")
    ref = page_ref("a", budget=100)

    def send(**settings):
        client = OpenAIClient("m", url, lambda ref: noise, **settings)
        completion = asyncio.run(client.complete(Request(chat(user("q", ref)), seed=1)))
        data = received[-1]["messages"][-1]["content"][1]["image_url"]["url"].split(",")[1]
        assert completion.image_bytes == len(data)
        raw = base64.b64decode(data)
        assert [Image.open(io.BytesIO(raw)).size] == completion.image_sizes
        return len(raw), completion.image_sizes[0]

    full, size = send()
    assert size == (280, 280)
    low, _ = send(jpeg_quality=75)
    assert low < full
    small, size = send(jpeg_quality=75, max_image_bytes=low // 2)
    assert small <= low // 2
    assert size[0] % 28 == 0
    assert size[0] < 280
    completion = asyncio.run(OpenAIClient("m", url, page_image).complete(Request(chat(user("q")), seed=1)))
    assert completion.image_bytes == 0


def test_who_takes_tools():
    assert takes_tools(OpenAIClient("m", "http://127.0.0.1:1/v1", page_image))
    assert not takes_tools(ScriptedClient(["x"]))
