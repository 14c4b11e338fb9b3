"""The DAG agent and ReAct against a real HTTP server through the real `openai` client."""

from __future__ import annotations

import asyncio
import json

import pytest
from dag_support import add, answer, as_written, summarise
from systems_support import QUESTION, Endpoint, Store, WordRetriever, chat_answer, page_picture, refuse

pytest.importorskip("openai")

from visor.models.base import Sampling
from visor.models.openai import OpenAIClient
from visor.systems.config import LoopConfig
from visor.systems.registry import SystemParts, build_system, plain_graph_policy
from visor.taec.captions import Captions
from visor.taec.config import TaecConfig
from visor.taec.graph_policy import make_graph_policy
from visor.taec.requirements import ModelSlotExtractor

SCRIPT = [
    add("s1", "blue bridge"),
    summarise("The overview does not contain the height.", (1, 4), (2, 2)),
    add("s2", "height of the bridge", ["s1"]),
    summarise("The page clearly shows a height of 9 metres.", (3, 5)),
    answer("9", ["s2"]),
]


@pytest.fixture
def endpoint():
    servers = []

    def start(reply):
        servers.append(Endpoint(reply))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def native_reply(completion):
    [call] = completion.tool_calls
    return chat_answer(None, (call.call_id, call.name, call.arguments))


def solve(name, client, taec=None, slots=None, **loop):
    config = LoopConfig(**loop)
    store = Store()
    extractor = ModelSlotExtractor(client) if slots == "model" else None

    async def policies(question):
        given = await extractor.extract(question.text) if extractor else None
        return make_graph_policy(taec, question.text, Captions(store), plain_graph_policy(config), given)

    parts = SystemParts(client, WordRetriever(), store, Sampling(0.3), loop=config, graph_policies=policies)
    return asyncio.run(build_system(name, parts).solve(QUESTION))


def scripted(replies):
    """Gives the replies in order to the requests that are in the order of the script."""
    waiting = list(replies)
    return lambda body: waiting.pop(0)


def check_protocol(messages):
    """What an endpoint of the protocol demands of a conversation: each call is answered, right after it."""
    pending: set[str] = set()
    for message in messages:
        if message["role"] == "tool":
            assert message["tool_call_id"] in pending
            pending.remove(message["tool_call_id"])
            assert isinstance(message["content"], str)
        else:
            assert not pending, "a call without its result"
        for call in message.get("tool_calls") or []:
            json.loads(call["function"]["arguments"])
            pending.add(call["id"])
    assert not pending


def test_native_calls_over_http(endpoint):
    server = endpoint(scripted(map(native_reply, SCRIPT)))
    trajectory = solve(
        "dag", OpenAIClient("m", server.url, page_picture, jpeg_quality=75, max_image_bytes=38_000)
    )
    assert trajectory.answer == "9"
    assert trajectory.meta["protocol"] == {"name": "native"}
    for body in server.received:
        check_protocol(body["messages"])
        assert [tool["function"]["name"] for tool in body["tools"]] == [
            "add_search_node", "summarize_and_memorize", "add_answer_node",
        ]  # fmt: skip
    with_pictures = server.received[1]["messages"]
    assert [message["role"] for message in with_pictures] == ["system", "user", "assistant", "tool", "user"]
    sent = [turn.completion.image_bytes for turn in trajectory.turns]
    assert sent[0] == 0
    shown = [len(message.images) for message in trajectory.turns[1].context]
    assert 0 < sent[1] <= sum(shown) * 38_000 * 4 / 3 + 4 * sum(shown)


def test_react_over_http(endpoint):
    replies = [
        chat_answer("look", ("", "search", '{"query": "blue bridge"}')),
        chat_answer(None, ("a", "search", '{"query": "gate"}'), ("b", "search", "{not json")),
        chat_answer(None, ("c", "answer", '{"response": "9"}')),
    ]
    server = endpoint(scripted(replies))
    trajectory = solve("react", OpenAIClient("m", server.url, page_picture))
    assert trajectory.answer == "9"
    for body in server.received:
        check_protocol(body["messages"])
    roles = [message["role"] for message in server.received[2]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "user", "assistant", "tool", "tool", "user"]


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'),
        (404, "No endpoints found that support tool use."),
    ],
)
def test_an_endpoint_without_tools_is_asked_in_text_and_the_record_says_so(endpoint, status, message):
    texts = iter(map(as_written, SCRIPT))

    def reply(body):
        return refuse(message, status) if "tools" in body else chat_answer(next(texts))

    server = endpoint(reply)
    trajectory = solve("dag", OpenAIClient("m", server.url, page_picture))
    assert trajectory.answer == "9"
    assert trajectory.meta["protocol"]["name"] == "text"
    assert "the endpoint refused tools" in trajectory.meta["protocol"]["reason"]
    assert ["tools" in body for body in server.received] == [True, *[False] * 5]
    assert all(m["role"] != "tool" for body in server.received for m in body["messages"])


def test_an_endpoint_that_ignores_tools_is_read_all_the_same(endpoint):
    server = endpoint(scripted(chat_answer(as_written(reply)) for reply in SCRIPT))
    trajectory = solve("dag", OpenAIClient("m", server.url, page_picture))
    assert trajectory.answer == "9"
    assert all(turn.flags == ["call written as text"] for turn in trajectory.turns)


def test_transient_errors_are_tried_again_and_others_end_the_question(endpoint, monkeypatch):
    import anyio

    async def no_wait(*args):
        """Waits are the client's own affair."""

    monkeypatch.setattr(anyio, "sleep", no_wait)
    replies = [refuse("slow down", 429), refuse("oops", 500), *map(native_reply, SCRIPT)]
    server = endpoint(scripted(replies))
    assert solve("dag", OpenAIClient("m", server.url, page_picture)).answer == "9"
    assert len(server.received) == 7
    denied = endpoint(lambda body: refuse("bad key", 401))
    trajectory = solve("dag", OpenAIClient("m", denied.url, page_picture))
    assert (trajectory.error.source, trajectory.error.type) == ("policy", "AuthenticationError")


def test_taec_over_the_endpoint_makes_one_call_more_a_question(endpoint):
    replies = [chat_answer('["height", "bridge", "blue", "unit", "year"]'), *map(native_reply, SCRIPT)]
    server = endpoint(scripted(replies))
    config = TaecConfig(slot_extractor="model").for_dag()
    trajectory = solve("dag", OpenAIClient("m", server.url, page_picture), config, slots="model")
    assert trajectory.answer == "9"
    assert len(server.received) == len(SCRIPT) + 1
    assert "tools" not in server.received[0]
    assert server.received[0]["temperature"] == 0.0
    record = trajectory.meta["evidence_policy"]
    assert record["name"] == "taec-AMV"
    assert record["slots"]["keywords"] == ["height", "bridge", "blue", "unit"]
    assert record["slots"]["model_calls"] == 1
    assert record["dead_ends"] == {"blue bridge": "no result"}
    assert len(record["searches"]) == 2
    prompt = trajectory.turns[4].context[1].text
    assert 'The search "blue bridge" was a dead end (no result)' in prompt
    assert "add the answer now" in prompt
    assert record["allocations"][-1]["searches"] == 2


def test_the_model_reports_what_is_settled_when_it_is_asked(endpoint):
    [call] = SCRIPT[1].tool_calls
    arguments = json.loads(call.arguments) | {"settled": ["height"]}
    reported = chat_answer(None, ("c", call.name, json.dumps(arguments)))
    replies = [native_reply(SCRIPT[0]), reported, *map(native_reply, SCRIPT[2:])]
    server = endpoint(scripted(replies))
    config = TaecConfig(semantic_state=True).for_dag()
    trajectory = solve("dag", OpenAIClient("m", server.url, page_picture), config)
    schema = server.received[0]["tools"][1]["function"]["parameters"]["properties"]["settled"]
    assert schema["items"]["enum"] == ["height", "blue", "bridge"]
    record = trajectory.meta["evidence_policy"]
    assert record["slots"]["settled"] == ["height"]
    gains = [item["gain"]["coverage"] for search in record["searches"] for item in search["admitted"]]
    assert max(gains) > 0
    without = endpoint(scripted(map(native_reply, SCRIPT)))
    solve("dag", OpenAIClient("m", without.url, page_picture), TaecConfig().for_dag())
    assert "settled" not in without.received[0]["tools"][1]["function"]["parameters"]["properties"]
