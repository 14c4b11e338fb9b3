import random

import torch
from torch import nn

from sft.sampler import SortedStepsSampler

RNG = random.Random(0)
LENGTHS = [RNG.randrange(10, 500) for _ in range(103)]


def steps(sampler, size):
    order = list(sampler)
    return [order[i : i + size] for i in range(0, len(order), size)]


def test_every_row_once_and_each_step_is_sorted():
    sampler = SortedStepsSampler(LENGTHS, 16, seed=1)
    assert sorted(sampler) == list(range(len(LENGTHS)))
    assert len(sampler) == len(LENGTHS)
    for step in steps(sampler, 16):
        lengths = [LENGTHS[row] for row in step]
        assert lengths == sorted(lengths, reverse=True)


def test_a_step_holds_the_rows_of_plain_random_order():
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(len(LENGTHS), generator=generator).tolist()
    plain = [set(order[i : i + 16]) for i in range(0, len(order), 16)]
    assert [set(step) for step in steps(SortedStepsSampler(LENGTHS, 16, seed=1), 16)] == plain


def test_order_follows_from_seed_and_epoch():
    first, again, other = (SortedStepsSampler(LENGTHS, 16, seed=seed) for seed in (1, 1, 2))
    assert list(first) == list(again) != list(other)
    again.set_epoch(1)
    assert list(first) != list(again)
    again.set_epoch(0)
    assert list(first) == list(again)


def test_micro_batches_of_a_sorted_step_hold_less_padding():
    def padding(order):
        batches = [order[i : i + 8] for i in range(0, len(order), 8)]
        return sum(max(LENGTHS[r] for r in b) * len(b) - sum(LENGTHS[r] for r in b) for b in batches)

    plain = torch.randperm(len(LENGTHS), generator=torch.Generator().manual_seed(1)).tolist()
    assert padding(list(SortedStepsSampler(LENGTHS, 32, seed=1))) < 0.6 * padding(plain)


def test_the_token_mean_over_micro_batches_does_not_depend_on_their_order():
    """Why sorting inside a step is free: the gradient is that of one sum over the step's tokens."""
    torch.manual_seed(0)
    layer, inputs = nn.Linear(4, 1), torch.randn(16, 4)
    gradients = []
    for order in (range(16), sorted(range(16), key=lambda row: -LENGTHS[row])):
        layer.zero_grad()
        for start in range(0, 16, 4):
            (layer(inputs[list(order)[start : start + 4]]).sum() / 16).backward()
        gradients.append(layer.weight.grad.clone())
    torch.testing.assert_close(*gradients)
