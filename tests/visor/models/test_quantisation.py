"""Weights in 4 and 8 bits below an adapter; the real library where it is installed."""

import importlib.util

import pytest
import torch
from models_support import chat, page_image, page_ref, user

from visor.models.loading import load_model
from visor.models.lora import load_policy
from visor.models.merging import merged_weights
from visor.models.options import ModelOptions
from visor.models.quantisation import quantisation_config
from visor.models.tensors import collate, forward_logprobs

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
KINDS = {
    "nf4": {"load_in_4bit": True}, "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "nested": {"load_in_4bit": True, "use_bnb_nested_quant": True}, "8 bits": {"load_in_8bit": True},
}  # fmt: skip


def options(path, **values) -> ModelOptions:
    known = {"model_name_or_path": str(path), "use_peft": True, "lora_r": 2, "dtype": "float32"}
    return ModelOptions(**{**known, **values})


def adapted(path, kind):
    """A policy whose adapter does something."""
    model = load_policy(options(path, **KINDS[kind]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
    return model


@pytest.fixture
def batch(renderer):
    rows = [renderer.encode(chat(user("hello", page_ref("a"))), page_image)]
    batch = collate(rows, renderer, page_image)
    batch["loss_mask"] = batch["attention_mask"].bool().clone()
    batch["loss_mask"][:, 0] = False
    return batch


@needs_bitsandbytes
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_language_models_blocks_are_quantised_and_only_the_adapter_trains(tiny_path, batch, kind):
    model = adapted(tiny_path, kind)
    quantised = {name for name, p in model.named_parameters() if p.dtype in (torch.uint8, torch.int8)}
    linear = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ".layers." in name and ".lora_" not in name
    }
    assert quantised == {f"{name}.weight" for name in linear}
    assert len(quantised) == 7 * model.config.text_config.num_hidden_layers
    model.train()
    forward_logprobs(model, batch).sum().backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum()}
    assert moved
    assert all(".lora_" in name for name in moved)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


@needs_bitsandbytes
@pytest.mark.parametrize("kind", ["nf4", "nested"])
def test_evaluation_and_training_compute_the_same(tiny_path, batch, kind):
    """On CPUs with AVX-512 bitsandbytes would repack the weights at the first evaluation."""
    model = adapted(tiny_path, kind)
    with torch.no_grad():
        before = forward_logprobs(model.train(), batch)
        evaluated = forward_logprobs(model.eval(), batch)
    trained = forward_logprobs(model.train(), batch)
    torch.testing.assert_close(evaluated, before, atol=1e-6, rtol=0)
    torch.testing.assert_close(trained.detach(), before, atol=1e-6, rtol=0)
    trained.sum().backward()


@needs_bitsandbytes
@pytest.mark.parametrize(("kind", "tolerance"), [("nf4", 1e-5), ("nested", 1e-5), ("8 bits", 5e-2)])
def test_merged_weights_are_the_dequantised_ones_with_the_adapter(tiny_path, batch, kind, tolerance):
    """8-bit layers quantise what they read too."""
    model = adapted(tiny_path, kind).eval()
    with torch.no_grad():
        expected = forward_logprobs(model, batch)
        plain = load_model(tiny_path, dtype="float32")
        names = {name for name, _ in plain.named_parameters()}
        merged = dict(merged_weights(model))
        assert merged.keys() == names
        plain.load_state_dict(merged, strict=False)
        torch.testing.assert_close(forward_logprobs(plain, batch), expected, atol=tolerance, rtol=0)
        torch.testing.assert_close(forward_logprobs(model, batch), expected, atol=1e-6, rtol=0)


def test_merged_weights_of_an_adapter_on_whole_weights(tiny_path, batch):
    from visor.models.lora import add_lora

    model = add_lora(load_model(tiny_path, dtype="float32"), rank=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
        plain = load_model(tiny_path, dtype="float32")
        merged = dict(merged_weights(model))
        assert merged.keys() == {name for name, _ in plain.named_parameters()}
        plain.load_state_dict(merged, strict=False)
        torch.testing.assert_close(
            forward_logprobs(plain, batch), forward_logprobs(model.eval(), batch), atol=1e-5, rtol=0
        )
        whole = dict(merged_weights(plain))
        assert all(torch.equal(whole[name], merged[name]) for name in whole)


def test_what_quantised_weights_need(tiny_path, monkeypatch):
    with pytest.raises(ValueError, match="weights that cannot train; set use_peft"):
        load_policy(options(tiny_path, use_peft=False, load_in_4bit=True))
    if importlib.util.find_spec("bitsandbytes") is None:
        with pytest.raises(
            ValueError, match=r"load_in_4bit needs bitsandbytes: pip install 'visor-rag\[quant\]'"
        ):
            load_policy(options(tiny_path, load_in_4bit=True))
    assert quantisation_config(options(tiny_path)) is None
