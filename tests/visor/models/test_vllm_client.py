"""What the vLLM client sends to an engine and makes of its replies, with an engine of a few lines; the real
one is in test_vllm_engine.py."""

import asyncio
import sys

import pytest
from models_support import chat, page_image, page_ref, user

from visor.models.base import ContextTooLong, Request, Sampling, TooManyImages
from visor.models.sampling_engine import EngineReply
from visor.models.vllm import VLLMClient
from visor.types import FinishReason, text_message


class EchoEngine:
    """Gives every prompt the same reply; expands images as vLLM does, times `stretch`."""

    model, max_context, max_images = "echo", 200, 2

    def __init__(self, renderer, reply, *, stretch=1):
        self.pad, self.reply, self.stretch = renderer.image_token_id, reply, stretch
        self.vocab_size = len(renderer.tokenizer) + 3
        self.calls = []

    async def generate(self, prompt, params):
        self.calls.append((prompt, params))
        pads = iter([image.width * image.height // 784 * self.stretch for image in prompt.images])
        ids = []
        for token in prompt.token_ids:
            ids += [token] * (next(pads) if token == self.pad else 1)
        return EngineReply(self.reply, [-0.5] * len(self.reply), "stop", ids)


@pytest.fixture
def engine(renderer):
    return EchoEngine(renderer, [*renderer.text_ids("hello"), renderer.im_end_id])


@pytest.fixture
def client(engine, renderer):
    return VLLMClient(engine, renderer, page_image, policy_version=4)


def ask(client, *requests):
    async def gather():
        return await asyncio.gather(*map(client.complete, requests), return_exceptions=True)

    return asyncio.run(gather())


def test_what_is_sent_and_what_is_made_of_the_reply(client, engine, renderer):
    stray = text_message("assistant", "x")
    stray.token_ids = [renderer.image_token_id, renderer.im_end_id]
    messages = chat(user("q", page_ref("a"), page_ref("c", budget=30)), stray, user("go on"))
    sampling = Sampling(temperature=0.5, top_p=0.9, max_tokens=9)
    (completion,) = ask(client, Request(messages, seed=3, sampling=sampling))
    encoded = renderer.encode(messages, page_image)
    assert completion.prompt_token_ids == encoded.input_ids
    assert completion.image_sizes == encoded.image_sizes
    assert completion.text == "hello"
    assert completion.token_ids == engine.reply
    assert completion.logprobs == [-0.5] * len(engine.reply)
    assert completion.finish_reason == FinishReason.STOP
    assert completion.policy_version == 4
    assert completion.model == "echo"
    ((prompt, params),) = engine.calls
    assert prompt.token_ids.count(renderer.image_token_id) == 2
    assert [image.size for image in prompt.images] == encoded.image_sizes
    assert (params.seed, params.temperature, params.top_p, params.max_tokens) == (3, 0.5, 0.9, 9)
    assert set(params.stop_ids) == renderer.stop_ids
    beyond = {len(renderer.tokenizer) + i for i in range(3)}
    assert set(params.banned_ids) == (renderer.special_ids - renderer.stop_ids) | beyond


def test_limits_are_checked_before_the_engine(client, engine):
    sampling = Sampling(max_tokens=20)
    good = Request(chat(user("q")), seed=0, sampling=sampling)
    long = Request(chat(user("hello" * 300)), seed=0, sampling=sampling)
    images = Request(chat(user(*[page_ref("a", budget=4)] * 3)), seed=0, sampling=sampling)
    results = ask(client, long, good, images)
    assert isinstance(results[0], ContextTooLong)
    assert results[1].text == "hello"
    assert isinstance(results[2], TooManyImages)
    assert len(engine.calls) == 1


def test_an_image_resized_again_is_noticed(client, engine):
    engine.stretch = 2
    (result,) = ask(client, Request(chat(user(page_ref("a"))), seed=0, sampling=Sampling(max_tokens=5)))
    assert isinstance(result, AssertionError)
    assert "resize" in str(result)


def test_a_banned_id_in_a_reply_is_an_error(client, engine, renderer):
    engine.reply = [renderer.image_token_id, renderer.im_end_id]
    (result,) = ask(client, Request(chat(user("q")), seed=0, sampling=Sampling(max_tokens=5)))
    assert isinstance(result, AssertionError)
    assert "banned" in str(result)


def test_requests_do_not_wait_for_each_other(client, engine):
    """A later turn of one episode starts while the first of another still runs."""
    slow, order = asyncio.Event(), []
    echo = engine.generate

    async def generate(prompt, params):
        if params.seed == 0:
            await slow.wait()
        order.append(params.seed)
        return await echo(prompt, params)

    engine.generate = generate

    async def run():
        first = asyncio.create_task(client.complete(Request(chat(user("q")), 0, Sampling(max_tokens=5))))
        for seed in (1, 2):
            await client.complete(Request(chat(user("q")), seed, Sampling(max_tokens=5)))
        slow.set()
        await first

    asyncio.run(asyncio.wait_for(run(), 10))
    assert order == [1, 2, 0]


def test_without_the_package_the_extra_is_named(monkeypatch, tiny_path):
    from visor.models.vllm_engine import LocalEngine

    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match=r"visor-rag\[vllm\]"):
        LocalEngine(str(tiny_path))
