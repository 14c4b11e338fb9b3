"""Scores in chunks against scores at once, and rows with ready features against rows with pixels."""

import pytest
import torch
from models_support import chat, page_image, page_ref, user

from rollout.rows import messages_row
from visor.models import output_layer
from visor.models.features import ImageFeatures, collate_with_features, same_vision
from visor.models.loading import load_model
from visor.models.lora import add_lora
from visor.models.tensors import collate, forward_logprobs
from visor.types import text_message


@pytest.fixture
def rows(renderer):
    """Two rows that show page a, one of them after another page."""
    reply = text_message("assistant", "hello page 2 agent")
    other = text_message("assistant", "revenue is 4 .")
    first = chat(user(page_ref("a"), "hello"), reply)
    second = chat(user(page_ref("b"), "search"), reply, user(page_ref("a"), " for page"), other)
    return [messages_row(messages, renderer, page_image) for messages in (first, second)]


def gradients(model, batch):
    """(log-probabilities, entropy, {name: gradient}) under weights that differ from token to token."""
    model.zero_grad()
    logprobs, entropy = forward_logprobs(model, batch, entropy=True)
    (logprobs * torch.linspace(-1, 2, logprobs.numel()).view_as(logprobs)).sum().backward()
    return logprobs, entropy, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def same(one, other) -> None:
    torch.testing.assert_close(one[0], other[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(one[1], other[1], atol=1e-6, rtol=0)
    assert one[2].keys() == other[2].keys()
    for name, gradient in one[2].items():
        torch.testing.assert_close(gradient, other[2][name], atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_chunks_change_neither_values_nor_gradients(tiny_path, rows, renderer, monkeypatch, tokens, lora):
    model = load_model(tiny_path, dtype="float32")
    model = add_lora(model, rank=4, alpha=8, dropout=0.0, seed=0) if lora else model
    batch = collate(rows, renderer, page_image)
    assert int(batch["loss_mask"].sum()) > 2 * tokens
    whole = gradients(model, batch)
    monkeypatch.setattr(output_layer, "LOGIT_BYTES", 4 * model.config.text_config.vocab_size * tokens)
    same(gradients(model, batch), whole)
    with torch.no_grad():
        torch.testing.assert_close(forward_logprobs(model, batch), whole[0], atol=1e-6, rtol=0)


def test_no_more_logits_than_those_of_a_chunk_are_made(tiny_path, rows, renderer, monkeypatch):
    model = load_model(tiny_path, dtype="float32")
    vocabulary = model.config.text_config.vocab_size
    monkeypatch.setattr(output_layer, "LOGIT_BYTES", 4 * vocabulary * 3)
    seen = []
    plain = torch.nn.functional.linear

    def linear(hidden, weight, bias=None):
        if weight.shape[0] == vocabulary:
            seen.append(len(hidden))
        return plain(hidden, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    batch = collate(rows, renderer, page_image)
    gradients(model, batch)
    assert max(seen) <= 3
    assert sum(seen) == 2 * int(batch["loss_mask"].sum())  # once in the forward pass, once in the backward


def test_the_output_layer_is_itself_again(model, rows, renderer):
    batch = collate(rows, renderer, page_image)
    forward_logprobs(model, batch)
    assert "forward" not in model.lm_head.__dict__
    batch["position_ids"] = batch["position_ids"][..., :3]
    with pytest.raises(RuntimeError):
        forward_logprobs(model, batch)
    assert "forward" not in model.lm_head.__dict__
    assert model.lm_head(torch.zeros(1, 64)).shape[-1] == model.config.text_config.vocab_size


@pytest.mark.parametrize("checkpointing", [False, True])
def test_ready_features_change_neither_values_nor_gradients(tiny_path, rows, renderer, checkpointing):
    model = load_model(tiny_path, dtype="float32", freeze=["vision_tower", "projector"])
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    features = ImageFeatures(model.train(), renderer, page_image)
    whole = gradients(model, collate(rows, renderer, page_image))
    passes = []
    hook = model.model.visual.register_forward_hook(lambda *_: passes.append(1))
    batch = collate_with_features(rows, features, "cpu")
    same(gradients(model, batch), whole)
    same(gradients(model, collate_with_features(rows, features, "cpu")), whole)
    assert len(passes) == 1  # two pictures in three places, kept
    hook.remove()


def test_features_serve_only_models_with_the_same_vision(tiny_path):
    one, other = load_model(tiny_path), load_model(tiny_path)
    assert same_vision(one, other)
    with torch.no_grad():
        next(other.model.visual.merger.parameters()).add_(1e-6)
    assert not same_vision(one, other)
