"""Scripts: in order, by question, by function, from files."""

import asyncio

import pytest
from models_support import chat, user

from visor.models.base import Request
from visor.models.loading import make_client
from visor.models.scripted import ScriptedClient
from visor.types import Completion, text_message


def request(question="q1", replies=0):
    rest = [text_message("assistant", "r")] * min(replies, 2)
    return Request(chat(user(f"question : {question}"), *rest), seed=0)


async def episode(client, question, turns):
    texts = []
    for turn in range(turns):
        texts.append((await client.complete(request(question, turn))).text)
        await asyncio.sleep(0)
    return texts


def test_in_order():
    client = ScriptedClient(["a", "b"])
    assert asyncio.run(episode(client, "q1", 2)) == ["a", "b"]
    with pytest.raises(ValueError, match="2 replies"):
        asyncio.run(episode(client, "q1", 1))


def test_by_question_each_episode_starts_anew():
    client = ScriptedClient({"q1": ["a", "a", "a", "b"], "q1 and more": ["c", "d", "e", "f"]})

    async def run():
        many = await asyncio.gather(
            episode(client, "q1", 4), episode(client, "q1 and more", 4), episode(client, "q1", 4)
        )
        return [*many, await episode(client, "q1", 2), await episode(client, "q1", 4)]

    texts = asyncio.run(run())
    assert texts == [list("aaab"), list("cdef"), list("aaab"), list("aa"), list("aaab")]
    with pytest.raises(ValueError, match="no replies for the question"):
        asyncio.run(episode(client, "other", 1))
    with pytest.raises(ValueError, match="'q1' has 4 replies"):
        asyncio.run(episode(client, "q1", 5))


def test_function_may_give_text_or_a_completion():
    client = ScriptedClient(lambda request: request.messages[-1].text)
    assert asyncio.run(episode(client, "q", 1)) == ["question : q"]
    client = ScriptedClient(lambda request: Completion(text="x", token_ids=[1]))
    assert asyncio.run(client.complete(request())).token_ids == [1]


def test_files(tmp_path):
    path = tmp_path / "script.jsonl"
    path.write_text('{"question": "q1", "replies": ["a", "b"]}\n\n{"question": "q2", "replies": ["c"]}\n')
    client = make_client(f"script:{path}")
    assert asyncio.run(episode(client, "q2", 1)) == ["c"]
    assert asyncio.run(episode(client, "q1", 2)) == ["a", "b"]
    assert client.name == "script"
    path.write_text('{"reply": "a"}\n{"reply": "b"}\n')
    assert asyncio.run(episode(ScriptedClient.from_file(path), "any", 2)) == ["a", "b"]
    path.write_text('{"reply": "a"}\n{"replies": ["b"]}\n')
    with pytest.raises(ValueError, match=r"script.jsonl, line 2"):
        ScriptedClient.from_file(path)
    path.write_text('{"reply": "a"}\n{"question": "q", "replies": ["b"]}\n')
    with pytest.raises(ValueError, match="either"):
        ScriptedClient.from_file(path)


def test_a_script_that_is_no_utf8_is_named(tmp_path):
    (tmp_path / "script.jsonl").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"script\.jsonl is not UTF-8 text"):
        ScriptedClient.from_file(tmp_path / "script.jsonl")
