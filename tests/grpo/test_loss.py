import json
import math
from pathlib import Path

import pytest
import torch

from grpo.loss import (
    LossSettings,
    kl_to_reference,
    policy_loss,
    row_coefficients,
    token_losses,
    weighted_loss,
)

CASES = Path(__file__).parents[2].parent / "shared" / "cases" / "files" / "grpo_cases.json"


def cases() -> dict:
    if not CASES.exists():
        pytest.skip("the shared cases folder is not here")
    return json.loads(CASES.read_text())


def padded(rows: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(map(len, rows))
    losses = torch.tensor([row + [7.0] * (length - len(row)) for row in rows])
    mask = torch.tensor([[1.0] * len(row) + [0.0] * (length - len(row)) for row in rows])
    return losses, mask


def test_token_loss_matches_a_slow_loop():
    torch.manual_seed(0)
    new, old, reference = torch.randn(3, 5), torch.randn(3, 5), torch.randn(3, 5)
    advantages = torch.tensor([1.5, -0.5, 0.0])
    settings = LossSettings(epsilon=0.1, epsilon_high=0.3, beta=0.05)
    loss, kl, clipped = token_losses(new, old, advantages, settings, reference)
    for i in range(3):
        for t in range(5):
            ratio = math.exp(new[i, t] - old[i, t])
            a = advantages[i].item()
            surrogate = min(ratio * a, min(max(ratio, 0.9), 1.3) * a)
            d = (reference[i, t] - new[i, t]).item()
            k3 = math.exp(d) - d - 1
            assert loss[i, t].item() == pytest.approx(-surrogate + 0.05 * k3, abs=1e-5)
            assert kl[i, t].item() == pytest.approx(k3, abs=1e-5)
            cut = (ratio > 1.3 and a > 0) or (ratio < 0.9 and a < 0)
            assert clipped[i, t].item() == float(cut)
    assert 0 < clipped.sum() < 15


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_two_sided_and_sequence_losses_match_a_slow_loop(level):
    torch.manual_seed(0)
    new, old = torch.randn(3, 5), torch.randn(3, 5)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 0, 1, 1], [0, 0, 0, 0, 0]]).float()
    advantages = torch.tensor([1.5, -0.5, 2.0])
    settings = LossSettings(epsilon=0.1, epsilon_high=0.3, delta=1.5, importance_sampling_level=level)
    loss, _, clipped = token_losses(new, old, advantages, settings, mask=mask)
    assert loss.shape == clipped.shape == (3, 5)
    for i in range(3):
        trained = [t for t in range(5) if mask[i, t]]
        mean = sum(new[i, t].item() - old[i, t].item() for t in trained) / max(1, len(trained))
        for t in range(5):
            ratio = math.exp(mean if level == "sequence" else new[i, t] - old[i, t])
            a = advantages[i].item()
            surrogate = min(min(ratio, 1.5) * a, min(max(ratio, 0.9), 1.3) * a)
            assert loss[i, t].item() == pytest.approx(-surrogate, abs=1e-5)
            cut = (ratio > 1.3 and a > 0) or (ratio < 0.9 and a < 0) or (ratio > 1.5 and a < 0)
            assert clipped[i, t].item() == float(cut)


def test_delta_bounds_the_loss_of_bad_tokens_and_ends_their_gradient():
    new = torch.tensor([[3.0, 0.1]], requires_grad=True)
    loss, _, clipped = token_losses(new, torch.zeros(1, 2), torch.tensor([-1.0]), LossSettings(delta=2.0))
    assert loss[0, 0].item() == 2.0
    loss.sum().backward()
    assert new.grad[0].tolist() == pytest.approx([0.0, math.exp(0.1)])
    assert clipped.tolist() == [[1.0, 0.0]]


def test_a_sequence_ratio_looks_at_trained_tokens_only():
    """Padding and prompt positions, whatever they hold, change neither loss nor gradient."""
    settings = LossSettings(importance_sampling_level="sequence")
    mask = torch.tensor([[0.0, 1.0, 1.0, 0.0]])
    results = []
    for stray in (0.0, 5.0):
        new = torch.tensor([[stray, 0.1, -0.3, -stray]], requires_grad=True)
        loss, _ = policy_loss(
            new, torch.zeros(1, 4), torch.tensor([1.0]), mask, torch.tensor([0.5]), settings
        )
        loss.backward()
        results.append((loss.item(), new.grad.tolist()))
    assert results[0] == results[1]
    # Both tokens of the row carry the row's ratio, and each half of its gradient.
    assert results[0][0] == pytest.approx(-math.exp(-0.1))
    assert results[0][1][0] == pytest.approx([0.0, -math.exp(-0.1) / 2, -math.exp(-0.1) / 2, 0.0])


def test_unknown_names_are_refused():
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="token or sequence"):
        token_losses(x, x, torch.ones(1), LossSettings(importance_sampling_level="row"))
    with pytest.raises(ValueError, match="dapo, grpo, bnpo or dr_grpo"):
        row_coefficients([1], ["a"], LossSettings(loss_type="ppo"))


def test_clip_stops_the_gradient_on_the_far_side_only():
    for logratio, advantage, flows in [
        (0.5, 1.0, False),
        (0.5, -1.0, True),
        (-0.5, -1.0, False),
        (-0.5, 1.0, True),
    ]:
        new = torch.tensor([[logratio]], requires_grad=True)
        loss, _, _ = token_losses(new, torch.zeros(1, 1), torch.tensor([advantage]), LossSettings())
        loss.sum().backward()
        assert (new.grad.abs().item() > 0) == flows


def test_kl_is_zero_at_the_reference_and_never_negative():
    logprobs = torch.randn(4, 6) - 2
    assert kl_to_reference(logprobs, logprobs.clone()).abs().max() == 0
    assert kl_to_reference(logprobs, logprobs + torch.randn(4, 6)).min() >= 0


def test_clamped_kl_is_bounded_and_has_no_gradient_there():
    logprobs = torch.tensor([[-1.0, -20.0]], requires_grad=True)
    reference = torch.tensor([[-1.5, -0.5]])
    free = kl_to_reference(logprobs.detach(), reference)
    assert free[0, 1] > 1e8
    settings = LossSettings(beta=1.0, kl_clamp=10.0)
    loss, kl, _ = token_losses(logprobs, logprobs.detach(), torch.zeros(1), settings, reference)
    torch.testing.assert_close(kl, torch.tensor([[free[0, 0].item(), 10.0]]))
    loss.sum().backward()
    assert logprobs.grad[0, 1] == 0
    assert logprobs.grad[0, 0].item() == pytest.approx(1 - math.exp(-0.5))


def test_beta_without_reference_is_refused():
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="reference"):
        token_losses(x, x, torch.ones(1), LossSettings(beta=0.1))


def test_masked_truncated_completion_leaves_numerator_and_denominator():
    case = cases()["E2a_masked_truncated"]
    losses, mask = padded([[row["per_token_loss"]] * row["tokens"] for row in case["rows"]])
    coefficients = row_coefficients(
        [row["tokens"] for row in case["rows"]], ["a", "b"], LossSettings(),
        excluded=[row["truncated"] for row in case["rows"]],
    )  # fmt: skip
    assert weighted_loss(losses, mask, torch.tensor(coefficients)).item() == pytest.approx(
        case["right_token_mean"]
    )


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
def test_micro_batches_change_nothing(size, loss_type):
    rows = cases()["E2b_accumulation"]["per_token_loss_rows"]
    settings = LossSettings(loss_type=loss_type, max_completion_length=8)
    coefficients = torch.tensor(row_coefficients([len(r) for r in rows], list("abcd"), settings))
    torch.manual_seed(1)
    scale = torch.randn(4, 8)

    def total(size: int) -> tuple[float, torch.Tensor]:
        parameter = torch.ones(8, requires_grad=True)
        losses, mask = padded(rows)
        value = 0.0
        for start in range(0, 4, size):
            part = slice(start, start + size)
            loss = weighted_loss(losses[part] + scale[part] * (parameter - 1), mask[part], coefficients[part])
            loss.backward()
            value += loss.item()
        return value, parameter.grad

    expected = {"dapo": 2.3, "bnpo": 2.3, "grpo": 2.375, "dr_grpo": (4 + 8 + 30 + 4) / 32}[loss_type]
    value, gradient = total(size)
    assert value == pytest.approx(expected, abs=1e-6)
    assert torch.allclose(gradient, total(4)[1], atol=1e-6)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
def test_turn_and_trajectory_rows_give_each_trajectory_the_same_weight(loss_type):
    settings = LossSettings(loss_type=loss_type)
    turns = row_coefficients([3, 4, 2, 6], ["a", "a", "a", "b"], settings)
    whole = row_coefficients([9, 6], ["a", "b"], settings)
    assert 3 * turns[0] + 4 * turns[1] + 2 * turns[2] == pytest.approx(9 * whole[0])
    assert 6 * turns[3] == pytest.approx(6 * whole[1])


def test_row_weights_multiply_before_the_token_mean():
    plain = row_coefficients([3, 5], ["a", "b"], LossSettings())
    weighted = row_coefficients([3, 5], ["a", "b"], LossSettings(), row_weights=[2.0, 0.5])
    assert weighted == pytest.approx([2 * plain[0], 0.5 * plain[1]])


def test_rows_outside_the_loss_leave_the_statistics():
    x = torch.full((2, 3), -1.0)
    mask = torch.ones(2, 3)
    coefficients = torch.tensor([1 / 3, 0.0])
    x[1] = float(-50)
    advantages = torch.tensor([2.0, 9.0])
    loss, stats = policy_loss(
        x, x.clone(), advantages, mask, coefficients, LossSettings(), reference=x - 1, entropy=-x
    )
    assert loss.item() == pytest.approx(-2.0)
    assert (stats.tokens, stats.entropy) == (3.0, 3.0)
    assert stats.mean(stats.kl) == pytest.approx(math.exp(-1))


def test_an_update_without_tokens_is_zero_not_nan():
    assert row_coefficients([4], ["a"], LossSettings(), excluded=[True]) == [0.0]
    assert row_coefficients([], [], LossSettings()) == []
