"""A small collection with captions, and clients that play a model: scripted ones and a real HTTP endpoint."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from PIL import Image

from visor.models.base import Sampling
from visor.retrieval.base import ScoredPage, rank
from visor.systems.config import LoopConfig
from visor.systems.registry import SystemParts, build_system
from visor.taec.text import jaccard, tokens
from visor.types import Completion, ImageRef, Page, Question, ToolCall

QUESTION = Question(question_id="q1", text="height of the blue bridge")
CAPTIONS = {
    "a#page=1": "blue bridge overview",
    "a#page=2": "height of the blue bridge is 9",
    "a#page=3": "green gate height",
    "b#page=1": "blue tower",
    "b#page=2": "red gate",
    "b#page=3": "height of the tower",
}


class Store:
    def __init__(self, captions=CAPTIONS):
        self.captions = captions

    def page(self, page_id):
        doc_id, _, number = page_id.partition("#page=")
        fields = {"image": "x.png", "width": 700, "height": 900, "caption": self.captions[page_id]}
        return Page(page_id=page_id, doc_id=doc_id, page_number=int(number), **fields)

    def pages(self):
        return [self.page(page_id) for page_id in self.captions]

    def image(self, page_id):
        return page_picture(ImageRef(page_id=page_id, min_pixels=784, max_pixels=784))

    def document_path(self, doc_id):
        return None


def page_picture(ref: ImageRef) -> Image.Image:
    shade = sum(map(ord, ref.page_id)) % 255
    return Image.linear_gradient("L").resize((700, 900)).point(lambda value: value ^ shade).convert("RGB")


class WordRetriever:
    """Ranks by shared words; a page that shares none is no candidate."""

    name = "words"

    def __init__(self, captions=CAPTIONS, error=None):
        self.captions = captions
        self.error = error
        self.asked = []

    def search(self, query, k):
        if self.error:
            raise self.error
        self.asked.append((query, k))
        wanted = tokens(query)
        hits = [ScoredPage(page, jaccard(wanted, tokens(text))) for page, text in self.captions.items()]
        return rank([hit for hit in hits if hit.score > 0], k)


class Replies:
    """Replies in order, texts or native calls; an exception among them is raised. Keeps the requests."""

    name = "scripted"

    def __init__(self, *replies, takes_tools=False):
        self.replies = list(replies)
        self.takes_tools = takes_tools
        self.requests = []

    async def complete(self, request):
        self.requests.append(request)
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        await asyncio.sleep(0)
        return reply if isinstance(reply, Completion) else Completion(text=reply, model=self.name)


def native(name, text="", call_id="c1", **arguments):
    """A completion with one native call."""
    call = ToolCall(call_id=call_id, name=name, arguments=json.dumps(arguments))
    return Completion(text=text, tool_calls=[call], model="scripted")


def make(name, client, retriever=None, store=None, **loop):
    parts = SystemParts(
        client,
        retriever or WordRetriever(),
        store or Store(),
        Sampling(temperature=0.3),
        loop=LoopConfig(**loop),
    )
    return build_system(name, parts)


def solve(name, client, question=QUESTION, retriever=None, store=None, seed=0, sample_index=0, **loop):
    system = make(name, client, retriever, store, **loop)
    return asyncio.run(system.solve(question, seed=seed, sample_index=sample_index))


class Endpoint:
    """An HTTP server that speaks the chat protocol: `reply(body)` gives (status, answer) for each request."""

    def __init__(self, reply):
        self.received = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.received.append(body)
                status, answer = reply(body)
                payload = json.dumps(answer).encode()
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

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def chat_answer(text=None, *calls, finish=None):
    """A reply of the endpoint; `calls` are (id, name, arguments as JSON text)."""
    message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in calls
        ]
    choice = {"index": 0, "finish_reason": finish or ("tool_calls" if calls else "stop"), "message": message}
    return 200, {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


def refuse(message, status=400):
    return status, {"error": {"message": message, "type": "invalid_request_error"}}
