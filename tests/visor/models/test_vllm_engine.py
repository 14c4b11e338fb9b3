"""The real vLLM engine against Transformers: same prompts, same numbers, and new weights that do count."""

import asyncio

import numpy as np
import pytest
import torch
from models_support import chat, page_image, page_ref, user

from visor.models.base import ContextTooLong, Request, Sampling, TooManyImages
from visor.models.loading import load_model, load_processor
from visor.models.lora import add_lora
from visor.models.rendering import Encoded
from visor.models.sampling_engine import EngineBusy, EnginePrompt, EngineSampling
from visor.models.tensors import collate, forward_logprobs
from visor.models.transformers import TransformersClient
from visor.models.vllm import VLLMClient
from visor.types import Completion, FinishReason, Message

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
    vision = cache == "image features"
    mixed = dict(stored) | {n: w for n, w in changed.state_dict().items() if ("visual" in n) == vision}
    # Longer than the blocks of which the prefix cache consists.
    messages = chat(user("page", page_ref("a"), "What is the revenue?" * 20))
    requests = [Request(messages, seed=0, sampling=Sampling(temperature=0.0, max_tokens=8))]
    ask(client, requests)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_reset", lambda: None)
        runner = engine._llm.model_executor.driver_worker.worker.model_runner
        patch.setattr(runner, "reset_encoder_cache", lambda: None)
        engine.load_weights(list(mixed.items()))
        if vision:
            engine._llm.reset_prefix_cache()
        stale = numbers(client, requests)
    engine.reset_caches()
    model = load_model(engine.model, dtype="float32")
    model.load_state_dict(mixed)
    right = numbers(TransformersClient(model, renderer, page_image), requests)
    assert differ(stale, right)
    assert not differ(numbers(client, requests), right)


def test_weights_of_a_merged_adapter(client, engine, slide_policy, renderer):
    model = add_lora(load_model(slide_policy, dtype="float32"), rank=4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    merged = model.merge_and_unload()
    engine.load_weights(merged.state_dict().items())
    requests = requests_of(4, temperature=0.0)
    ours = numbers(client, requests)
    assert not differ(ours, numbers(TransformersClient(merged, renderer, page_image), requests))
    stored_policy = TransformersClient(load_model(slide_policy, dtype="float32"), renderer, page_image)
    assert differ(ours, numbers(stored_policy, requests))


def test_scores_are_those_of_the_present_weights(client, engine, changed, renderer):
    requests = requests_of(5, temperature=1.0)
    completions = ask(client, requests)
    engine.load_weights(changed.state_dict().items())
    expected = rescored(changed, requests, completions, renderer)
    for request, completion, scores in zip(requests, completions, expected):
        encoded = renderer.encode(request.messages, page_image)
        np.testing.assert_allclose(client.score(encoded, completion.token_ids), scores, atol=TOLERANCE)
    assert client.score(encoded, []) == []


def test_a_reply_up_to_the_end_of_the_context_can_be_scored(client, engine, renderer, slide_policy):
    encoded = renderer.encode(prompt(0), page_image)
    reply = renderer.text_ids("hello ") * engine.max_context
    reply = reply[: engine.max_context - len(encoded.input_ids)]
    completion = Completion(
        text="", token_ids=reply, finish_reason=FinishReason.LENGTH, seconds=0.0, model=""
    )
    model = load_model(slide_policy, dtype="float32")
    (expected,) = rescored(model, [Request(prompt(0), 0)], [completion], renderer)
    np.testing.assert_allclose(client.score(encoded, reply), expected, atol=5e-4)


def test_weights_that_are_not_all_are_refused_and_nothing_changes(client, engine, changed):
    requests = requests_of(2, temperature=0.0)
    before = numbers(client, requests)
    with pytest.raises(ValueError, match=r"missing: model\.language_model\.norm\.weight"):
        engine.load_weights(
            [(n, w) for n, w in changed.state_dict().items() if "language_model.norm" not in n]
        )
    assert not differ(numbers(client, requests), before)


def test_weights_are_not_loaded_while_a_request_runs(client, engine, stored):
    async def run():
        reply = asyncio.create_task(client.complete(requests_of(1, max_tokens=400)[0]))
        while not engine._running:
            await asyncio.sleep(0.001)
        with pytest.raises(EngineBusy, match="1 requests run"):
            await asyncio.to_thread(engine.load_weights, stored)
        return await reply

    assert asyncio.run(run()).token_ids


# ---------------------------------------------------------------- requests


def test_a_seed_gives_the_same_reply_whatever_else_runs(client, engine, changed):
    engine.load_weights(changed.state_dict().items())
    requests = requests_of(8, temperature=1.0)
    together = ask(client, requests)
    alone = [ask(client, [request])[0] for request in requests]
    reverse = ask(client, requests[::-1])[::-1]
    for a, b, c in zip(together, alone, reverse):
        assert a.token_ids == b.token_ids == c.token_ids
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=TOLERANCE)
    group = [Request(prompt(2), seed, Sampling(max_tokens=12)) for seed in range(6)]
    assert len({tuple(c.token_ids) for c in ask(client, group)}) > 3


def test_more_prompt_tokens_than_one_step_takes(client, vllm_engine, renderer):
    text = "What is the revenue of acme? " * 40
    requests = [Request(chat(user(f"{i} {text}")), i, Sampling(max_tokens=4)) for i in range(30)]
    length = len(renderer.encode(requests[0].messages, page_image).input_ids)
    assert 30 * length > vllm_engine._llm.vllm_config.scheduler_config.max_num_batched_tokens
    together = ask(client, requests)
    assert [c.token_ids for c in together[::10]] == [ask(client, [r])[0].token_ids for r in requests[::10]]


def test_limits_of_images_and_context_end_only_their_request(client, vllm_engine, cases):
    """Cases I1 and I2 with this engine's limits: 3 images, 1,024 tokens."""
    budget = cases("vllm_budget.json")
    assert budget["I1"]["images_after_turn"][-1] > budget["I1"]["limit_mm_per_prompt"]
    many = chat(user(*[page_ref("a", i) for i in range(vllm_engine.max_images + 1)]))
    long = chat(user("hello " * vllm_engine.max_context))
    big = chat(user(*[page_ref("d", i, budget=1024) for i in range(2)]))
    sampling = Sampling(max_tokens=5)
    messages = [prompt(1), many, long, big, prompt(2)]
    good, images, text, pages, also_good = ask(client, [Request(m, 0, sampling) for m in messages])
    assert good.token_ids
    assert also_good.token_ids
    assert isinstance(images, TooManyImages)
    assert isinstance(text, ContextTooLong)
    assert isinstance(pages, ContextTooLong)
    assert "exceed the context of 1024" in str(pages)


def test_banned_ids_are_never_sampled(client, engine, renderer, slide_policy):
    """The pad's logit is made the largest at every position, which the log-probabilities show."""
    model = load_model(slide_policy, dtype="float32")
    pad = renderer.image_token_id
    encoded = renderer.encode(prompt(0), page_image)
    with torch.no_grad():
        hidden = model.model(torch.tensor([encoded.input_ids])).last_hidden_state[0]
        mean = hidden[-3:].mean(0)
        model.lm_head.weight[pad] = 40 * mean / mean.square().sum()
    engine.load_weights(model.state_dict().items())
    sampling = Sampling(max_tokens=8)
    completions = ask(client, [Request(prompt(0), seed, sampling) for seed in range(4)])
    assert client.score(encoded, [pad])[0] > -0.01
    for completion in completions:
        assert not set(completion.token_ids) & (renderer.special_ids - renderer.stop_ids)
    assert min(completion.logprobs[0] for completion in completions) < -5


def test_stop_ids_end_a_reply_and_are_kept(client, renderer):
    completions = ask(client, requests_of(3, max_tokens=200, temperature=0.0))
    ended = [c for c in completions if c.finish_reason == FinishReason.STOP]
    assert ended
    for completion in ended:
        assert completion.token_ids[-1] in renderer.stop_ids
        assert not set(completion.token_ids[:-1]) & renderer.stop_ids


def test_a_refused_request_harms_no_other(vllm_engine, renderer):
    good = EnginePrompt(renderer.encode(prompt(0), page_image).input_ids)
    too_long = EnginePrompt(good.token_ids * 200)
    unheard_of = EnginePrompt([*good.token_ids, vllm_engine.vocab_size + 5])
    sampling = EngineSampling(max_tokens=4, stop_ids=sorted(renderer.stop_ids))

    async def gather():
        calls = [vllm_engine.generate(p, sampling) for p in (good, too_long, unheard_of, good)]
        return await asyncio.gather(*calls, return_exceptions=True)

    first, long, unknown, last = asyncio.run(gather())
    assert first.token_ids == last.token_ids
    assert isinstance(long, ValueError)
    assert isinstance(unknown, ValueError)


def test_a_cancelled_request_leaves_the_engine(client, vllm_engine):
    async def run():
        task = asyncio.create_task(client.complete(requests_of(1, max_tokens=900)[0]))
        while not vllm_engine._running:
            await asyncio.sleep(0.001)
        task.cancel()
        while vllm_engine._running:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 60))
    assert ask(client, requests_of(1))[0].token_ids


def test_replies_arrive_one_by_one(client, engine, changed):
    """A short reply does not wait for a long one, and its episode's next turn joins while that still runs."""
    engine.load_weights(changed.state_dict().items())

    async def run():
        long = asyncio.create_task(
            client.complete(Request(prompt(0), 1, Sampling(max_tokens=900, temperature=1.0)))
        )
        for seed in range(3):
            await client.complete(Request(prompt(1), seed, Sampling(max_tokens=3)))
            if seed == 0:
                alive = not long.done()
        long.cancel()
        return alive

    assert asyncio.run(asyncio.wait_for(run(), 120))
