import copy

import torch
from torch import nn

from sft.optimizer import MuonWithAdamW, adamw, split_parameters


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)

    def get_output_embeddings(self):
        return self.head

    def loss(self, ids):
        return self.head(self.norm(self.hidden(self.embed(ids)))).logsumexp(-1).mean()


def names(model, parameters):
    by_id = {id(p): name for name, p in model.named_parameters()}
    return {by_id[id(p)] for p in parameters}


def test_only_hidden_matrices_go_to_muon():
    model = Net()
    matrices, others = split_parameters(model)
    assert names(model, matrices) == {"hidden.weight"}
    assert names(model, others) == {"embed.weight", "hidden.bias", "norm.weight", "norm.bias", "head.weight"}
    model.norm.requires_grad_(False)
    assert names(model, split_parameters(model)[1]) == {"embed.weight", "hidden.bias", "head.weight"}


def test_the_real_model_splits_as_intended(world):
    from visor.models.loading import load_model

    model = load_model(world / "policy")
    matrices, others = split_parameters(model)
    assert all(".blocks." in n or ".layers." in n or ".merger." in n for n in names(model, matrices))
    assert {n for n in names(model, others) if dict(model.named_parameters())[n].ndim >= 2} == {
        "model.language_model.embed_tokens.weight",
        "model.visual.patch_embed.proj.weight",
    }


def step(model, *optimizers):
    ids = torch.arange(11)
    for _ in range(3):
        model.loss(ids).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_one_step_equals_the_two_optimizers_apart():
    ours, apart = Net(), Net()
    step(ours, MuonWithAdamW(ours, muon_learning_rate=0.02, learning_rate=0.01))
    matrices, others = split_parameters(apart)
    step(apart, torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.0), adamw(others, 0.01))
    for (name, p), q in zip(ours.named_parameters(), apart.parameters()):
        assert torch.equal(p, q), name


def test_schedulers_reach_both_and_state_survives_a_round_trip():
    model = Net()
    optimizer = MuonWithAdamW(model, muon_learning_rate=0.02, learning_rate=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    step(model, optimizer)
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.005]
    other = Net()
    other.load_state_dict(model.state_dict())
    again = MuonWithAdamW(other, muon_learning_rate=1.0, learning_rate=1.0)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [group["lr"] for group in again.param_groups] == [0.01, 0.005]
    step(model, optimizer)
    step(other, again)
    for p, q in zip(model.parameters(), other.parameters()):
        assert torch.equal(p, q)
