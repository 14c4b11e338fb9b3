"""The weights that an engine is given: names and values of plain, wrapped and adapted policies."""

import copy

import pytest
import torch
from torch import nn

from grpo.policy_push import full_parameters
from visor.models.loading import load_model
from visor.models.lora import add_lora


@pytest.fixture
def policy(world):
    return load_model(world / "policy")


class Wrapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def adapted(policy, **settings):
    from peft import LoraConfig, get_peft_model

    config = {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": r".*language_model.*\.(q_proj|down_proj)",
        **settings,
    }
    model = get_peft_model(policy, LoraConfig(**config))
    randomise(model)
    return model


def randomise(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.normal_(std=0.3)


def merged(model):
    return dict(copy.deepcopy(model).merge_and_unload().named_parameters())


def test_names_and_values_are_those_of_the_state_dict(policy):
    pushed = dict(full_parameters(policy))
    stored = policy.state_dict()
    assert stored.keys() - pushed.keys() == {"lm_head.weight"}  # tied to the embeddings
    assert pushed.keys() <= stored.keys()
    assert all(torch.equal(pushed[name], stored[name]) for name in pushed)
    assert not any(tensor.requires_grad for tensor in pushed.values())


def test_wrappers_are_looked_through(policy):
    pushed = dict(full_parameters(Wrapped(Wrapped(policy))))
    assert pushed.keys() == dict(full_parameters(policy)).keys()


@pytest.mark.parametrize(
    "settings",
    [{}, {"use_rslora": True}, {"modules_to_save": ["norm"]}, {"target_modules": ["q_proj", "qkv"]}],
    ids=["plain", "rank-stabilised", "with a saved module", "vision too"],
)
def test_an_adapter_is_merged_into_copies(policy, settings):
    plain = dict(full_parameters(policy)).keys()
    model = adapted(policy, **settings)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    pushed = {name: tensor.clone() for name, tensor in full_parameters(Wrapped(model))}
    assert pushed.keys() == plain
    expected = merged(model)
    assert all(torch.allclose(pushed[name], expected[name], rtol=1e-6, atol=1e-7) for name in plain)
    changed = [name for name in plain if not torch.equal(expected[name], before_name(before, name))]
    assert changed
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def before_name(before, name):
    """The weight of the model below the adapter."""
    layer, _, kind = name.rpartition(".")
    candidates = [
        f"base_model.model.{name}",
        f"base_model.model.{layer}.base_layer.{kind}",
        f"base_model.model.{layer}.original_module.{kind}",
    ]
    return next(before[candidate] for candidate in candidates if candidate in before)


def test_the_merged_weights_compute_what_the_adapted_policy_computes(world, policy):
    model = add_lora(policy, rank=4, alpha=8)
    randomise(model)
    fresh = load_model(world / "policy")
    fresh.load_state_dict(dict(full_parameters(model)), strict=False)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.allclose(model(input_ids=ids).logits, fresh(input_ids=ids).logits, atol=1e-4)


def test_in_bfloat16_the_sum_is_rounded_once(policy):
    model = adapted(policy.to(torch.bfloat16))
    layer = next(m for n, m in model.named_modules() if n.endswith("layers.0.self_attn.q_proj"))
    name = "model.language_model.layers.0.self_attn.q_proj.weight"
    pushed = dict(full_parameters(model))[name]
    delta = (layer.lora_B["default"].weight @ layer.lora_A["default"].weight) * layer.scaling["default"]
    assert pushed.dtype == torch.bfloat16
    assert torch.equal(pushed, (layer.base_layer.weight + delta).to(torch.bfloat16))


def test_another_kind_of_adapter_is_refused(policy):
    with pytest.raises(ValueError, match="DoRA"):
        list(full_parameters(adapted(policy, use_dora=True)))
