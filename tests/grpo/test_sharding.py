"""The whole policy out of its parts, pictures without influence, and which launches and checkpoints fit."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType

from grpo.launching import check_launch
from grpo.policy_push import full_parameters
from grpo.sharding import WholePolicy, whole_parameters, without_weights
from grpo.shards import check_fits_launch
from rollout.rows import TrainingRow
from visor.models.blank_picture import with_blank_picture
from visor.models.loading import load_model, load_processor
from visor.models.lora import add_lora
from visor.models.tensors import collate, forward_logprobs


@pytest.fixture
def policy(world):
    return load_model(world / "policy")


def test_a_copy_without_weights_keeps_structure_ties_and_buffers(policy):
    policy.model.visual.requires_grad_(False)
    empty = without_weights(policy, torch.device("cpu"))
    assert sum(parameter.numel() for parameter in empty.parameters()) == 0
    assert empty.lm_head.weight is empty.get_input_embeddings().weight
    flags = [p.requires_grad for p in policy.parameters()]
    assert [p.requires_grad for p in empty.parameters()] == flags
    assert not empty.training
    for (name, buffer), (_, copied) in zip(policy.named_buffers(), empty.named_buffers(), strict=True):
        assert torch.equal(buffer, copied), name


def test_the_copy_has_the_present_weights_inside_and_none_outside(policy):
    whole = WholePolicy(without_weights(policy, torch.device("cpu")), trained=policy)
    ids = torch.arange(5, 25)[None]
    for _ in range(2):
        with torch.no_grad():
            policy.lm_head.weight.mul_(1.1)
            expected = policy(input_ids=ids).logits
            with whole.present() as model:
                assert torch.equal(model(input_ids=ids).logits, expected)
        assert sum(parameter.numel() for parameter in whole.model.parameters()) == 0


def test_the_copy_is_emptied_after_an_error(policy):
    whole = WholePolicy(without_weights(policy, torch.device("cpu")), trained=policy)
    with pytest.raises(RuntimeError), whole.present():
        raise RuntimeError
    assert sum(parameter.numel() for parameter in whole.model.parameters()) == 0


def test_full_parameters_of_an_adapted_policy_are_the_merged_ones(policy):
    adapted = add_lora(policy, rank=4, alpha=12)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    before = dict(whole_parameters(adapted))
    full = dict(full_parameters(adapted))
    after = dict(whole_parameters(adapted))
    assert all(torch.equal(before[name], after[name]) for name in before)
    merged = dict(adapted.merge_and_unload().named_parameters())
    assert full.keys() == merged.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(full[name], tensor, rtol=1e-6, atol=1e-7)


# ---------------------------------------------------------------- pictures without influence


def test_a_blank_picture_changes_neither_scores_nor_gradients(policy, world):
    renderer = load_processor(world / "policy").renderer()
    rows = [
        TrainingRow(input_ids=list(range(5, 5 + n)), loss_mask=[0] + [1] * (n - 1)) for n in (6, 9)
    ]  # the first is the shorter one: the picture stands apart from its end
    batch = collate(rows, renderer, images=None)
    results = []
    for tensors in (batch, with_blank_picture(batch, renderer)):
        policy.zero_grad()
        scores = forward_logprobs(policy, tensors)
        (scores * torch.arange(1, 10)[: scores.shape[1]].sum()).sum().backward()
        gradients = {n: None if p.grad is None else p.grad.clone() for n, p in policy.named_parameters()}
        results.append((scores.detach(), gradients))
    (plain, plain_gradients), (blank, blank_gradients) = results
    assert blank.shape[1] == plain.shape[1] + 1
    torch.testing.assert_close(blank[:, :-1], plain)
    assert not blank[:, -1].any()
    for name, gradient in blank_gradients.items():
        if "visual" in name:
            assert plain_gradients[name] is None
            assert not gradient.any(), name
        else:
            torch.testing.assert_close(gradient, plain_gradients[name], rtol=1e-4, atol=1e-4)


def test_a_batch_with_pictures_stays_as_it_is():
    batch = {"pixel_values": torch.zeros(4, 1176)}
    assert with_blank_picture(batch, renderer=None) is batch


# ---------------------------------------------------------------- launches


def accelerator(kind: DistributedType, processes: int = 2, **plugins):
    state = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None, **{})
    for name, plugin in plugins.items():
        setattr(state, name, SimpleNamespace(**plugin))
    return SimpleNamespace(distributed_type=kind, num_processes=processes, state=state)


def fsdp(**settings):
    usual = {"fsdp_version": 2, "reshard_after_forward": True, "cpu_ram_efficient_loading": True}
    return accelerator(DistributedType.FSDP, fsdp_plugin=usual | settings)


def test_launches_that_cannot_train(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="set fsdp_version: 2"):
        check_launch(fsdp(fsdp_version=1))
    with pytest.raises(ValueError, match="does not run on Megatron-LM"):
        check_launch(accelerator(DistributedType.MEGATRON_LM))


def test_processes_that_do_not_know_of_each_other(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes were launched and each has found 1"):
        check_launch(accelerator(DistributedType.NO, 1))


def test_every_process_loads_the_weights(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    launched = fsdp()
    check_launch(launched)
    assert launched.state.fsdp_plugin.cpu_ram_efficient_loading is False


@pytest.mark.parametrize(
    ("before", "number", "fits"),
    [
        ("fsdp", 2, True),
        ("fsdp", 4, False),
        ("fsdp_grad_op", 2, False),
        ("none", 2, False),
        ("zero3", 2, False),
    ],
)
def test_split_states_go_on_as_they_were_split(before, number, fits, tmp_path):
    state = {"sharding": before, "num_processes": number}
    if fits:
        check_fits_launch(state, tmp_path, fsdp())
        return
    with pytest.raises(ValueError, match=rf"of {number} processes .* this launch has 2 processes \(FSDP"):
        check_fits_launch(state, tmp_path, fsdp())


def test_whole_states_go_on_on_any_number_of_processes(tmp_path):
    check_fits_launch({"sharding": "none", "num_processes": 8}, tmp_path, accelerator(DistributedType.NO, 1))
    check_fits_launch({}, tmp_path, accelerator(DistributedType.NO, 1))
