"""The in-process client: samples belong to the request, log-probabilities to the model."""

import asyncio

import numpy as np
import pytest
import torch
from models_support import chat, page_image, page_ref, user
from PIL import Image

from rollout.rows import turn_rows
from visor.models.base import ContextTooLong, Request, Sampling, TooManyImages
from visor.models.decoding import inference
from visor.models.loading import load_model
from visor.models.sampling import Sampler, invert_cdf, nucleus
from visor.models.tensors import collate, forward_logprobs
from visor.models.transformers import TransformersClient, banned_ids
from visor.types import Answer, FinishReason, Message, TextPart, Trajectory, Turn

SAMPLING = Sampling(max_tokens=12)


def prompt(number: int) -> list[Message]:
    """Prompts of different lengths, with 0 to 2 images."""
    parts = ["revenue of acme", " hello" * number, page_ref("a", number + 1), "and", page_ref("c", budget=30)]
    return chat(user(*parts[: 2 + number % 4]))


def ask(client, requests):
    async def gather():
        return await asyncio.gather(*map(client.complete, requests), return_exceptions=True)

    return asyncio.run(gather())


@pytest.fixture
def client(model, renderer):
    return TransformersClient(model, renderer, page_image, name="tiny", policy_version=7)


def requests_of(count, **kwargs):
    return [
        Request(prompt(i), seed=100 + i, sampling=Sampling(max_tokens=12, **kwargs)) for i in range(count)
    ]


def test_completion_fields(client, renderer):
    (completion,) = ask(client, requests_of(4)[3:])
    encoded = renderer.encode(prompt(3), page_image)
    assert completion.prompt_token_ids == encoded.input_ids
    assert completion.image_sizes == encoded.image_sizes
    assert completion.model == "tiny"
    assert completion.policy_version == 7
    assert len(completion.token_ids) == len(completion.logprobs) <= 12
    assert completion.text == renderer.reply_text(completion.token_ids)


def test_samples_do_not_depend_on_the_batch(client):
    requests = requests_of(9)
    together = ask(client, requests)
    alone = [ask(client, [request])[0] for request in requests]
    other_order = ask(client, requests[::-1])[::-1]
    for a, b, c in zip(together, alone, other_order):
        assert a.token_ids == b.token_ids == c.token_ids
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5, rtol=0)
    assert len({tuple(c.token_ids) for c in together}) == 9


def test_batches_are_formed_from_concurrent_requests(client, monkeypatch):
    sizes = []
    serve = client._batcher._serve
    monkeypatch.setattr(client._batcher, "_serve", lambda batch: sizes.append(len(batch)) or serve(batch))
    client._batcher._batch_size = 6
    ask(client, requests_of(8))
    ask(client, requests_of(3))  # a second event loop on the same client
    assert sizes == [6, 2, 3]


def test_same_prompt_different_seeds_share_the_prefill_and_differ(client):
    requests = [Request(prompt(2), seed=seed, sampling=SAMPLING) for seed in range(6)]
    group = ask(client, requests)
    assert len({tuple(c.token_ids) for c in group}) > 3
    assert [c.token_ids for c in group] == [ask(client, [r])[0].token_ids for r in requests]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_turn_rows_rescore_to_the_sampled_logprobs(temperature, client, renderer, model):
    requests = requests_of(8, temperature=temperature, top_p=0.9)
    turns = [
        Turn(index=i, context=request.messages, completion=completion, action=Answer(text=""))
        for i, (request, completion) in enumerate(zip(requests, ask(client, requests)))
    ]
    rows = turn_rows(Trajectory(question_id="q", question="q", turns=turns), renderer, page_image)
    batch = collate(rows, renderer, page_image)
    with torch.no_grad():
        again = forward_logprobs(model, batch)
    assert batch["loss_mask"].sum() > 8
    torch.testing.assert_close(again, batch["old_logprobs"], atol=1e-4, rtol=0)


def greedy_loop(model, renderer, messages, steps):
    """The slow way: the whole sequence again for each token, no cache."""
    encoded = renderer.encode(messages, page_image)
    banned = banned_ids(model.lm_head.out_features, renderer)
    tokens = []
    for _ in range(steps):
        row = renderer.encode(messages, page_image)
        row.input_ids = encoded.input_ids + tokens
        batch = collate([row], renderer, page_image)
        keys = ("input_ids", "position_ids", "pixel_values", "image_grid_thw")
        with torch.no_grad():
            logits = model(**{key: batch[key] for key in keys if key in batch}).logits[0, -1]
        tokens.append(logits.masked_fill(banned, -torch.inf).argmax().item())
        if tokens[-1] in renderer.stop_ids:
            break
    return tokens


def test_greedy_equals_a_loop_without_cache(client, renderer, model):
    completions = ask(client, requests_of(4, temperature=0.0))
    for number, completion in enumerate(completions):
        assert completion.token_ids == greedy_loop(model, renderer, prompt(number), 12)


@pytest.fixture
def own_model(tiny_path):
    return load_model(tiny_path, dtype="float32")


def favour(model, token, amount):
    """Make the model give `token` a far higher (or lower) logit whatever the context."""
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.lm_head.out_features))
    with torch.no_grad():
        model.lm_head.bias[token] = amount


def test_special_ids_are_never_sampled(own_model, renderer):
    favour(own_model, renderer.image_token_id, 50.0)
    client = TransformersClient(own_model, renderer, page_image)
    for completion in ask(client, requests_of(6)):
        assert not set(completion.token_ids) & (renderer.special_ids - renderer.stop_ids)
        assert max(completion.logprobs) < -20  # of the model itself, which wants the banned id


def test_ids_beyond_the_tokenizer_are_banned(renderer):
    known = len(renderer.tokenizer)
    banned = banned_ids(known + 5, renderer)
    assert banned[known:].all()
    assert not banned[list(renderer.stop_ids)].any()
    assert banned.sum() == 5 + len(renderer.special_ids) - 2


def test_stop_ids_end_a_reply_and_are_kept(own_model, renderer):
    favour(own_model, renderer.im_end_id, 50.0)
    (completion,) = ask(TransformersClient(own_model, renderer, page_image), requests_of(1))
    assert completion.token_ids == [renderer.im_end_id]
    assert completion.text == ""
    assert completion.finish_reason == FinishReason.STOP
    favour(own_model, renderer.im_end_id, -50.0)
    own_model.lm_head.bias.data[renderer.pad_id] = -50.0
    (completion,) = ask(TransformersClient(own_model, renderer, page_image), requests_of(1))
    assert len(completion.token_ids) == 12
    assert completion.finish_reason == FinishReason.LENGTH


def test_length_limits_are_per_request(client):
    requests = [Request(prompt(i), seed=i, sampling=Sampling(max_tokens=1 + 3 * i)) for i in range(6)]
    for request, completion in zip(requests, ask(client, requests)):
        assert len(completion.token_ids) <= request.sampling.max_tokens
        (alone,) = ask(client, [request])
        assert alone.token_ids == completion.token_ids


def test_refused_requests_do_not_harm_the_others(model, renderer):
    length = len(renderer.encode(prompt(1), page_image).input_ids)
    client = TransformersClient(model, renderer, page_image, max_context=length + 12, max_images=1)
    bad_image = chat(user(page_ref("nowhere")))

    def source(ref):
        if ref.page_id.startswith("nowhere"):
            raise OSError(f"no image file for {ref.page_id}")
        if ref.page_id.startswith("thin"):
            return Image.new("RGB", (3000, 4))
        return page_image(ref)

    client.images = source
    requests = [
        Request(messages, seed=i, sampling=SAMPLING)
        for i, messages in enumerate(
            [
                prompt(0),
                prompt(3),
                chat(user("hello" * 400)),
                bad_image,
                chat(user(page_ref("thin"))),
                prompt(1),
            ]
        )
    ]
    good, images, long, missing, thin, also_good = ask(client, requests)
    assert good.token_ids
    assert also_good.token_ids
    assert isinstance(images, TooManyImages)
    assert isinstance(long, ContextTooLong)
    assert isinstance(missing, OSError)
    assert "nowhere#page=1" in str(missing)
    assert "thin#page=1" in str(thin)


def test_a_fault_of_the_model_reaches_every_request_and_the_client_goes_on(client, monkeypatch):
    def fail(*args):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(client, "_decode", fail)
        assert [str(result) for result in ask(client, requests_of(3))] == ["out of memory"] * 3
    assert ask(client, requests_of(1))[0].token_ids


def test_updates_are_visible_and_train_mode_is_restored(own_model, renderer):
    client = TransformersClient(own_model, renderer, page_image)
    requests = requests_of(4)
    before = ask(client, requests)
    own_model.train()
    own_model.model.visual.eval()
    modes = [module.training for module in own_model.modules()]
    assert [c.token_ids for c in ask(client, requests)] == [c.token_ids for c in before]
    assert [module.training for module in own_model.modules()] == modes
    with torch.no_grad():
        for parameter in own_model.model.language_model.parameters():
            parameter.mul_(1.5)
    assert [c.token_ids for c in ask(client, requests)] != [c.token_ids for c in before]


def test_modes_are_restored_after_an_error(own_model):
    own_model.train()

    def fail():
        with inference(own_model):
            assert not own_model.training
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert all(module.training for module in own_model.modules())


def test_image_features_are_kept_only_while_vision_is_frozen(own_model, renderer, monkeypatch):
    counted = []
    visual = own_model.model.visual
    forward = visual.forward
    monkeypatch.setattr(
        visual,
        "forward",
        lambda pixels, grid_thw, **kw: (
            counted.append(len(grid_thw)) or forward(pixels, grid_thw=grid_thw, **kw)
        ),
    )
    client = TransformersClient(own_model, renderer, page_image)
    twice = [Request(chat(user(page_ref("a"), page_ref("b"))), seed=i, sampling=SAMPLING) for i in range(3)]
    ask(client, twice)
    ask(client, twice)
    assert counted == [2, 2]  # each distinct image once a batch, none kept while vision trains
    for parameter in visual.parameters():
        parameter.requires_grad_(False)
    first = ask(client, twice)
    again = ask(
        client, [*twice, Request(chat(user(page_ref("c"), page_ref("a"))), seed=9, sampling=SAMPLING)]
    )
    assert counted == [2, 2, 2, 1]
    assert [c.token_ids for c in first] == [c.token_ids for c in again[:3]]
    client.clear_cache()
    ask(client, twice)
    assert counted[-1] == 2


# ---------------------------------------------------------------- sampling


def test_invert_cdf_by_hand_and_never_zero_weight():
    weights = torch.tensor([[0.0, 0.2, 0.0, 0.3, 0.5, 0.0]])
    expected = {0.0: 1, 0.19: 1, 0.21: 3, 0.49: 3, 0.51: 4, 1 - 2**-24: 4}
    for u, index in expected.items():
        assert invert_cdf(weights, torch.tensor([u])).item() == index


def test_nucleus_by_hand():
    probabilities = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    kept = lambda p: nucleus(probabilities, torch.tensor([[p]])).nonzero()[:, 1].tolist()  # noqa: E731
    assert kept(0.3) == [1]
    assert kept(0.5) == [1, 3]
    assert kept(0.75) == [1, 2, 3]
    assert kept(1.0) == [0, 1, 2, 3]


def test_sampled_frequencies_follow_temperature_and_ban():
    logits = torch.tensor([1.0, 0.0, 2.0, 5.0])
    banned = torch.tensor([False, False, False, True])
    requests = [Request([], seed=i, sampling=Sampling(temperature=0.7, max_tokens=1)) for i in range(20000)]
    chosen = Sampler(requests, banned)(logits.expand(20000, -1), 0)
    expected = torch.softmax(torch.tensor([1.0, 0.0, 2.0]) / 0.7, 0)
    measured = torch.bincount(chosen, minlength=4)[:3] / 20000
    torch.testing.assert_close(measured, expected, atol=0.015, rtol=0)
    assert (chosen != 3).all()


def test_greedy_and_sampled_rows_can_share_a_batch(client):
    greedy = Request(prompt(1), seed=1, sampling=Sampling(temperature=0.0, max_tokens=12))
    hot = Request(prompt(1), seed=1, sampling=Sampling(temperature=2.0, max_tokens=12))
    both = ask(client, [greedy, hot])
    assert both[0].token_ids == ask(client, [greedy])[0].token_ids
    assert both[1].token_ids == ask(client, [hot])[0].token_ids
    assert both[0].token_ids != both[1].token_ids


def test_assistant_history_with_ids_is_read_as_sampled(client, renderer):
    he, llo = renderer.text_ids("he"), renderer.text_ids("llo")
    reply = Message(
        role="assistant", content=[TextPart(text="hello")], token_ids=[*he, *llo, renderer.im_end_id]
    )
    (completion,) = ask(client, [Request(chat(user("q"), reply, user("?")), seed=0, sampling=SAMPLING)])
    ids = completion.prompt_token_ids
    where = [i for i in range(len(ids)) if ids[i : i + 3] == reply.token_ids]
    assert len(where) == 1
