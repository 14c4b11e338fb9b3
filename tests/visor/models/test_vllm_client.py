"""What the vLLM client sends to an engine and makes of its replies, with an engine of a few lines; the real
one is in test_vllm_engine.py."""

import asyncio
import sys
import time
from types import SimpleNamespace

import pytest
from models_support import chat, page_image, page_ref, user

from visor.models import vllm_engine
from visor.models.base import ContextTooLong, Request, Sampling, TooManyImages
from visor.models.sampling_engine import EngineFailed, EnginePrompt, EngineReply, EngineSampling
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
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match=r"visor-rag\[vllm\]"):
        vllm_engine.LocalEngine(str(tiny_path))


# ---------------------------------------------------------------- the engine's thread


class FakeLLM:
    """In the place of vLLM: dies at the first step, or never ends a request."""

    def __init__(self, dies):
        self.dies, self.added = dies, []
        self.model_config = SimpleNamespace(max_model_len=9, get_vocab_size=lambda: 9, hf_config=None)
        self.engine_core = SimpleNamespace(shutdown=lambda: None)

    def add_request(self, name, inputs, params):
        self.added.append(name)

    def step(self):
        if self.dies and len(self.added) == 2:
            raise MemoryError("no room for keys")
        time.sleep(0.01)
        return []


@pytest.fixture
def fake_engine(monkeypatch):
    def make(dies):
        def start(self, settings):
            self._llm = FakeLLM(dies)
            self._vllm, self._final_only = SimpleNamespace(SamplingParams=dict), None

        monkeypatch.setattr(vllm_engine.LocalEngine, "_start", start)
        monkeypatch.setattr(vllm_engine, "expected_weights", lambda config: None)
        return vllm_engine.LocalEngine("folder")

    return make


async def two_calls(engine):
    calls = [engine.generate(EnginePrompt([1]), EngineSampling(max_tokens=1)) for _ in range(2)]
    return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)


def test_an_engine_that_dies_tells_everyone_who_waits_and_who_comes(fake_engine):
    engine = fake_engine(dies=True)
    for error in asyncio.run(two_calls(engine)):
        assert isinstance(error, EngineFailed)
        assert "engine of folder died: MemoryError: no room for keys" in str(error)
    for late in (lambda: engine.score(EnginePrompt([1]), [2]), engine.reset_caches):
        with pytest.raises(EngineFailed, match="MemoryError"):
            late()
    engine.close()


def test_closing_ends_what_waits(fake_engine):
    engine = fake_engine(dies=False)

    async def run():
        waiting = asyncio.create_task(two_calls(engine))
        while len(engine._llm.added) < 2:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(engine.close)
        return await waiting

    for error in asyncio.run(run()):
        assert isinstance(error, EngineFailed)
        assert "was closed" in str(error)
    with pytest.raises(EngineFailed, match="was closed"):
        engine.reset_caches()
    engine.close()


def test_a_load_that_breaks_half_way_ends_the_sampling(fake_engine, monkeypatch):
    """Some layers then hold new weights and some old ones."""
    engine = fake_engine(dies=False)

    def broken(weights):
        raise OSError("disk gone")

    monkeypatch.setattr(engine, "_replace", broken)
    with pytest.raises(OSError, match="disk gone"):
        engine.load_weights(iter([]))
    for error in asyncio.run(two_calls(engine)):
        assert isinstance(error, EngineFailed)
        assert "weights loaded in part: disk gone" in str(error)
    with pytest.raises(EngineFailed, match="in part"):
        engine.load_weights(iter([]))
    engine.close()
