"""What the vLLM client sends and reads, with a stand-in for the engine that expands images as vLLM does."""

import asyncio
import sys
from types import ModuleType, SimpleNamespace

import pytest
from models_support import chat, page_image, page_ref, user

from visor.models.base import ContextTooLong, Request, Sampling, TooManyImages
from visor.models.vllm import VLLMClient
from visor.types import FinishReason, text_message


class StandInEngine:
    """Replies with the same ids to every prompt; keeps what it was called with."""

    reply: list[int]

    def __init__(self, **settings):
        self.settings, self.calls = settings, []
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=200))

    def generate(self, prompts, params, use_tqdm):
        self.calls.append((prompts, params))
        return [self._output(prompt) for prompt in prompts]

    def _output(self, prompt):
        images = iter(prompt.get("multi_modal_data", {}).get("image", []))
        ids = []
        for token in prompt["prompt_token_ids"]:
            ids += [token] * (self._pads(next(images)) if token == self.image_token_id else 1)
        logprobs = [
            {i: SimpleNamespace(logprob=-0.5), i + 1: SimpleNamespace(logprob=-9.0)} for i in self.reply
        ]
        out = SimpleNamespace(token_ids=tuple(self.reply), logprobs=logprobs, finish_reason="stop")
        return SimpleNamespace(prompt_token_ids=ids, outputs=[out])

    @staticmethod
    def _pads(image):
        return image.width * image.height // 784


@pytest.fixture
def client(monkeypatch, renderer):
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = StandInEngine, lambda **settings: settings
    monkeypatch.setitem(sys.modules, "vllm", module)
    StandInEngine.image_token_id = renderer.image_token_id
    StandInEngine.reply = [*renderer.text_ids("hello"), renderer.im_end_id]
    return VLLMClient("folder", renderer, page_image, max_images=2, engine_args={"tensor_parallel_size": 2})


def ask(client, *requests):
    async def gather():
        return await asyncio.gather(*map(client.complete, requests), return_exceptions=True)

    return asyncio.run(gather())


def test_prompts_and_completion(client, renderer):
    stray = text_message("assistant", "x")
    stray.token_ids = [renderer.image_token_id, renderer.im_end_id]
    messages = chat(user("q", page_ref("a"), page_ref("c", budget=30)), stray, user("go on"))
    (completion,) = ask(client, Request(messages, seed=3, sampling=Sampling(temperature=0.5, max_tokens=9)))
    encoded = renderer.encode(messages, page_image)
    assert completion.prompt_token_ids == encoded.input_ids
    assert completion.image_sizes == encoded.image_sizes
    assert completion.text == "hello"
    assert completion.token_ids == StandInEngine.reply
    assert completion.logprobs == [-0.5] * len(StandInEngine.reply)
    assert completion.finish_reason == FinishReason.STOP
    ((prompts, params),) = client._engine.calls
    assert prompts[0]["prompt_token_ids"].count(renderer.image_token_id) == 2
    assert [image.size for image in prompts[0]["multi_modal_data"]["image"]] == encoded.image_sizes
    assert params[0]["seed"] == 3
    assert params[0]["temperature"] == 0.5
    assert set(params[0]["logit_bias"]) == renderer.special_ids - renderer.stop_ids
    assert client._engine.settings["tensor_parallel_size"] == 2
    assert client._engine.settings["limit_mm_per_prompt"] == {"image": 2}


def test_limits_are_checked_before_the_engine(client):
    sampling = Sampling(max_tokens=20)
    good = Request(chat(user("q")), seed=0, sampling=sampling)
    long = Request(chat(user("hello" * 300)), seed=0, sampling=sampling)
    images = Request(chat(user(*[page_ref("a", budget=4)] * 3)), seed=0, sampling=sampling)
    results = ask(client, long, good, images)
    assert isinstance(results[0], ContextTooLong)
    assert results[1].text == "hello"
    assert isinstance(results[2], TooManyImages)
    assert [len(prompts) for prompts, _ in client._engine.calls] == [1]


def test_an_image_resized_again_is_noticed(client, monkeypatch):
    monkeypatch.setattr(StandInEngine, "image_token_id", -1)  # the stand-in then expands nothing
    (result,) = ask(client, Request(chat(user(page_ref("a"))), seed=0, sampling=Sampling(max_tokens=5)))
    assert isinstance(result, AssertionError)
    assert "resize" in str(result)


def test_without_the_package_the_extra_is_named(renderer, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match=r"visor-rag\[vllm\]"):
        VLLMClient("folder", renderer, page_image)
