"""The real vLLM engine against Transformers: same prompts, same numbers, and new weights that really count."""

import asyncio

import numpy as np
import pytest
import torch
from models_support import chat, page_image, page_ref, user

from visor.models.base import ContextTooLong, Request, Sampling, TooManyImages
from visor.models.loading import load_model, load_processor
from visor.models.rendering import Encoded
from visor.models.sampling_engine import EngineBusy, EnginePrompt, EngineSampling
from visor.models.tensors import collate, forward_logprobs
from visor.models.transformers import TransformersClient
from visor.models.vllm import VLLMClient
from visor.types import FinishReason, Message, TextPart

pytestmark = pytest.mark.vllm
TOLERANCE = 1e-4
"""Nats; float32 on both sides, with other kernels."""


@pytest.fixture(scope="module")
def renderer(slide_policy):
    return load_processor(slide_policy).renderer()


@pytest.fixture(scope="module")
def stored(slide_policy):
    return list(load_model(slide_policy, dtype="float32").state_dict().items())


@pytest.fixture
def engine(vllm_engine, stored):
    """The engine, with the stored weights put back afterwards."""
    yield vllm_engine
    vllm_engine.load_weights(stored)


@pytest.fixture
def client(vllm_engine, renderer):
    return VLLMClient(vllm_engine, renderer, page_image, name="tiny", policy_version=3)


@pytest.fixture
def changed(slide_policy):
    """A model of other weights, vision included, that is unsure of every token."""
    model = load_model(slide_policy, dtype="float32")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (0.3 * parameter.std(unbiased=False) + 0.01))
    return model


def prompt(number: int) -> list[Message]:
    """Prompts of different lengths, with 0 to 3 images, some of them repeated."""
    parts = [
        "What is the revenue of acme?",
        page_ref("a", number % 2),
        "and" + " hello" * number,
        page_ref("b", 1),
        page_ref("c", number % 3, budget=30),
    ]
    return chat(user(*parts[: 1 + number % 5]))


def requests_of(count, *, max_tokens=12, **kwargs):
    sampling = Sampling(max_tokens=max_tokens, **kwargs)
    return [Request(prompt(i), seed=100 + i, sampling=sampling) for i in range(count)]


def ask(client, requests):
    async def gather():
        return await asyncio.gather(*map(client.complete, requests), return_exceptions=True)

    return asyncio.run(gather())


def row_of(completion, messages, renderer) -> Encoded:
    """A prompt with its reply, the reply marked for scoring."""
    row = renderer.encode(messages, page_image)
    start = len(row.input_ids)
    row.input_ids = row.input_ids + completion.token_ids
    row.loss_mask = [False] * start + [True] * len(completion.token_ids)
    return row


def rescored(model, requests, completions, renderer):
    """The log-probabilities of each reply by one forward of Transformers."""
    rows = [row_of(c, r.messages, renderer) for c, r in zip(completions, requests)]
    batch = collate(rows, renderer, page_image)
    with torch.no_grad():
        scores = forward_logprobs(model, batch)
    return [row[mask].tolist() for row, mask in zip(scores, batch["loss_mask"])]


def test_prompts_ids_and_fields(client, renderer):
    requests = requests_of(5)
    for request, completion in zip(requests, ask(client, requests)):
        encoded = renderer.encode(request.messages, page_image)
        assert completion.prompt_token_ids == encoded.input_ids
        assert completion.image_sizes == encoded.image_sizes
        assert completion.text == renderer.reply_text(completion.token_ids)
        assert completion.model == "tiny"
        assert completion.policy_version == 3
        assert len(completion.token_ids) == len(completion.logprobs) <= 12


def test_the_engine_reads_the_very_ids_that_were_rendered(vllm_engine, client, renderer):
    encoded = renderer.encode(prompt(4), page_image)
    sampling = EngineSampling(max_tokens=1, stop_ids=sorted(renderer.stop_ids))
    reply = asyncio.run(vllm_engine.generate(client.prompt(encoded), sampling))
    assert reply.prompt_ids == encoded.input_ids
    assert len(encoded.images) == 3


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_logprobs_are_those_of_the_model(temperature, client, engine, changed, renderer):
    engine.load_weights(changed.state_dict().items())
    requests = requests_of(6, temperature=temperature, top_p=0.95)
    completions = ask(client, requests)
    again = rescored(changed, requests, completions, renderer)
    for completion, expected in zip(completions, again):
        np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)
    assert min(min(c.logprobs) for c in completions) < -0.1


def test_greedy_replies_equal_those_of_transformers(client, slide_policy, renderer):
    requests = requests_of(5, temperature=0.0, max_tokens=24)
    other = TransformersClient(load_model(slide_policy, dtype="float32"), renderer, page_image)
    for ours, theirs in zip(ask(client, requests), ask(other, requests)):
        assert ours.token_ids == theirs.token_ids
        assert ours.finish_reason == theirs.finish_reason
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=TOLERANCE)


# ---------------------------------------------------------------- weights and caches


def numbers(client, requests):
    """Ids and log-probabilities of greedy replies."""
    return [(c.token_ids, c.logprobs) for c in ask(client, requests)]


def differ(one, other) -> bool:
    return any(a[0] != b[0] or not np.allclose(a[1], b[1], atol=TOLERANCE) for a, b in zip(one, other))


@pytest.mark.parametrize("names", ["both", "embeddings", "output"])
def test_new_weights_of_language_and_vision_count_at_once(names, client, engine, changed, renderer):
    requests = requests_of(5, temperature=0.0)
    before = numbers(client, requests)
    left_out = {"both": "-", "embeddings": "lm_head", "output": "embed_tokens"}[names]
    weights = [(n, w) for n, w in changed.state_dict().items() if left_out not in n]
    engine.load_weights(iter(weights))
    after = numbers(client, requests)
    assert differ(before, after)
    assert not differ(after, numbers(TransformersClient(changed, renderer, page_image), requests))


@pytest.mark.parametrize("cache", ["prefixes", "image features"])
def test_a_cache_that_is_kept_would_show(cache, client, engine, changed, stored, renderer, monkeypatch):
    """A page and a prompt repeat over a push of weights: wrong numbers with either cache kept, right ones
    after the reset."""
    part = "visual" if cache == "image features" else "language_model"
    mixed = dict(stored) | {name: w for name, w in changed.state_dict().items() if part in name}
    # Longer than the blocks of which the prefix cache consists.
    messages = chat(user("page", page_ref("a"), "What is the revenue?" * 20))
    requests = [Request(messages, seed=0, sampling=Sampling(temperature=0.0, max_tokens=8))]
    ask(client, requests)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_reset", lambda: None)
        runner = engine._llm.model_executor.driver_worker.worker.model_runner
        patch.setattr(runner, "reset_encoder_cache", lambda: None)
        engine.load_weights(list(mixed.items()))
        if cache == "image features":
            engine._llm.reset_prefix_cache()
        stale = numbers(client, requests)
    engine.reset_caches()
    model = load_model(engine.model, dtype="float32")
    model.load_state_dict(mixed)
    right = numbers(TransformersClient(model, renderer, page_image), requests)
    assert differ(stale, right)
    assert not differ(numbers(client, requests), right)
