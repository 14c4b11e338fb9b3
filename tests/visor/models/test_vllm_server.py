"""`visor vllm-serve` with the real engine: what it samples equals what an engine in this process does."""

import asyncio

import numpy as np
import pytest
import torch
from models_support import chat, page_image, page_ref, user

from visor.models.base import Request, Sampling
from visor.models.loading import load_model, load_processor, make_client
from visor.models.sampling_engine import EngineFailed
from visor.models.transformers import TransformersClient
from visor.models.vllm import VLLMClient
from visor.models.vllm_remote import RemoteEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def renderer(slide_policy):
    return load_processor(slide_policy).renderer()


@pytest.fixture
def here(vllm_engine, renderer):
    return VLLMClient(vllm_engine, renderer, page_image)


@pytest.fixture
def there(vllm_server, slide_policy):
    return make_client(f"vllm:{slide_policy}@{vllm_server.url}", images=page_image)


def requests_of(count, **kwargs):
    pages = [page_ref("a"), page_ref("b"), page_ref("c", budget=30)]
    sampling = Sampling(max_tokens=12, **kwargs)
    return [
        Request(chat(user("revenue of acme", *pages[: i % 4], " hello" * i)), 50 + i, sampling)
        for i in range(count)
    ]


def ask(client, requests):
    async def gather():
        return await asyncio.gather(*map(client.complete, requests))

    return asyncio.run(gather())


def assert_equal(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a.token_ids == b.token_ids
        assert a.prompt_token_ids == b.prompt_token_ids
        assert a.finish_reason == b.finish_reason
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=TOLERANCE)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_seeds_give_the_same_replies(temperature, here, there):
    requests = requests_of(8, temperature=temperature)
    assert_equal(ask(here, requests), ask(there, requests))


def test_pushed_weights_count_as_in_process(here, vllm_engine, vllm_server, slide_policy, renderer):
    model = load_model(slide_policy, dtype="float32")
    stored = {name: weight.clone() for name, weight in model.state_dict().items()}
    remote = RemoteEngine(vllm_server.url, str(slide_policy), own_weights=False)
    there = VLLMClient(remote, renderer, page_image)
    requests = requests_of(8, temperature=1.0)
    before = ask(there, requests)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (0.3 * parameter.std(unbiased=False) + 0.01))
    remote.load_weights(model.state_dict().items())
    vllm_engine.load_weights(model.state_dict().items())
    try:
        after = ask(there, requests)
        assert_equal(after, ask(here, requests))
        assert [c.token_ids for c in after] != [c.token_ids for c in before]
        greedy = requests_of(4, temperature=0.0)
        assert_equal(ask(there, greedy), ask(TransformersClient(model, renderer, page_image), greedy))
        encoded = renderer.encode(requests[3].messages, page_image)
        scores = there.score(encoded, after[3].token_ids)
        np.testing.assert_allclose(scores, after[3].logprobs, atol=TOLERANCE)
    finally:
        vllm_engine.load_weights(stored.items())
        remote.load_weights(stored.items())
    assert_equal(ask(there, requests), before)
    assert remote.info().weights_version == 2


def test_a_server_that_ends_is_named(vllm_server, slide_policy, renderer):
    """The last test of this server: SIGTERM ends it with 0, and who asks then is told."""
    remote = RemoteEngine(vllm_server.url, str(slide_policy), own_weights=False, waits=(0.1,))
    there = VLLMClient(remote, renderer, page_image)
    assert vllm_server.stop() == 0
    with pytest.raises(EngineFailed, match=f"at {vllm_server.url} does not answer"):
        ask(there, requests_of(1))
