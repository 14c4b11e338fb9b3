"""The policy update on rows with pictures: micro-batches, credit modes, which rows count."""

import dataclasses

import pytest
import torch
from update_stage import largest_difference, make_stage, rows_for, updated

from grpo.batch import check_policy_row, rows_of_groups
from grpo.loss import LossSettings
from rollout.group import Group
from rollout.rows import trajectory_row, turn_rows
from visor.models.loading import load_model
from visor.models.tensors import collate, forward_logprobs
from visor.types import FinishReason


@pytest.fixture(scope="module")
def stage(world):
    return make_stage(world)


@pytest.mark.parametrize("credit", ["trajectory", "turn"])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
def test_micro_batch_size_changes_nothing(stage, credit, loss_type):
    rows = rows_for(stage, credit)
    settings = LossSettings(loss_type=loss_type, beta=0.1)
    weights, report = updated(stage, rows, credit, settings, micro_batch_size=8)
    start = dict(load_model(stage[3]).named_parameters())
    assert largest_difference(weights, start) > 1e-4
    for size in (1, 2):
        other, other_report = updated(stage, rows, credit, settings, micro_batch_size=size)
        assert largest_difference(weights, other) < 1e-6
        assert other_report.loss == pytest.approx(report.loss, abs=1e-6)
        assert other_report.stats.kl == pytest.approx(report.stats.kl, rel=1e-4)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_micro_batches_change_nothing_when_ratios_differ_from_one(stage, level):
    """Old log-probabilities as of another policy, so that clips bite, at either level of the ratio."""
    rows = rows_for(stage, "turn")
    for number, item in enumerate(rows):
        item.row.old_logprobs = [
            value and value + 0.05 * ((7 * number + 3 * place) % 11 - 5)
            for place, value in enumerate(item.row.old_logprobs)
        ]
    settings = LossSettings(
        loss_type="grpo", importance_sampling_level=level, epsilon=0.05, epsilon_high=0.1, beta=0.1
    )
    weights, report = updated(stage, rows, "turn", settings, micro_batch_size=8)
    assert 0 < report.stats.clipped < report.stats.tokens
    for size in (1, 2):
        other, other_report = updated(stage, rows, "turn", settings, micro_batch_size=size)
        assert largest_difference(weights, other) < 1e-6
        assert other_report.loss == pytest.approx(report.loss, abs=1e-6)
        assert other_report.stats.clipped == report.stats.clipped


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_accumulation_changes_nothing(stage, level):
    """Updates of four rows, as 4 × 1, 2 × 2 and 1 × 4, over two iterations."""
    rows = rows_for(stage, "turn")
    assert len(rows) == 6
    settings = LossSettings(importance_sampling_level=level, epsilon=0.01, beta=0.1)
    results = [
        updated(
            stage, rows, "trajectory", settings, micro_batch_size=size,
            gradient_accumulation_steps=4 // size, num_iterations=2,
        )
        for size in (4, 2, 1)
    ]  # fmt: skip
    (weights, report), *others = results
    assert len(report.loss) == 4
    for other, other_report in others:
        assert largest_difference(weights, other) < 1e-6
        assert other_report.loss == pytest.approx(report.loss, abs=1e-6)


def test_loss_and_gradient_equal_one_plain_formula(stage):
    """The update against autograd on the token mean written out over the rows."""
    renderer, images, _, path = stage
    rows = rows_for(stage, "trajectory")
    weights, _ = updated(stage, rows, settings=LossSettings(), micro_batch_size=2)
    model = load_model(path).train()
    total = sum(item.tokens for item in rows)
    loss = 0.0
    for item in rows:
        logprobs = forward_logprobs(model, collate([item.row], renderer, images))
        loss = (
            loss
            - item.row.advantage * torch.exp(logprobs - logprobs.detach()).mul(logprobs != 0).sum() / total
        )
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(weights[name], parameter - 0.1 * parameter.grad, atol=1e-6), name


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
def test_both_credit_modes_give_a_trajectory_the_same_weight(stage, loss_type):
    from collections import Counter

    from grpo.loss import row_coefficients

    sums = {}
    for credit in ("trajectory", "turn"):
        rows = rows_for(stage, credit)
        names = [item.row.trajectory for item in rows]
        weights = row_coefficients([item.tokens for item in rows], names, LossSettings(loss_type=loss_type))
        sums[credit] = Counter()
        for item, name, weight in zip(rows, names, weights):
            sums[credit][name] += weight * item.tokens
    assert len(sums["turn"]) == 3
    assert sums["turn"] == pytest.approx(sums["trajectory"])


def test_zero_advantage_rows_keep_their_place_in_the_token_mean(stage):
    rows = rows_for(stage, "trajectory")
    whole, _ = updated(stage, rows, settings=LossSettings(), micro_batch_size=8)
    rows[2].row.advantage = 0.0
    dropped, report = updated(stage, rows, settings=LossSettings(), micro_batch_size=8)
    assert report.stats.tokens == rows[0].tokens + rows[1].tokens
    rows[2].excluded = True
    without, _ = updated(stage, rows, settings=LossSettings(), micro_batch_size=8)
    start = dict(load_model(stage[3]).named_parameters())
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    ratio = ((without[name] - start[name]) / (dropped[name] - start[name])).nanmedian().item()
    assert ratio == pytest.approx(sum(r.tokens for r in rows) / (rows[0].tokens + rows[1].tokens), rel=1e-3)
    assert largest_difference(whole, dropped) > 0


def test_truncated_replies_are_excluded_on_request(stage):
    renderer, images, group, _ = stage
    group.trajectories[1].turns[0].completion.finish_reason = FinishReason.LENGTH

    def build(trajectory):
        return turn_rows(trajectory, renderer, images)

    try:
        rows = rows_of_groups([group], build, mask_truncated_completions=True).rows
        assert [item.excluded for item in rows] == [False, False, True, True, True, False]
        advantages = {item.row.trajectory: item.row.advantage for item in rows}
        kept = rows_of_groups([group], build).rows
        assert advantages == {item.row.trajectory: item.row.advantage for item in kept}
        assert not any(item.excluded for item in kept)
    finally:
        group.trajectories[1].turns[0].completion.finish_reason = FinishReason.STOP


def test_rows_that_were_not_sampled_as_they_stand_are_named(stage):
    renderer, images, group, _ = stage
    damaged = [trajectory.model_copy(deep=True) for trajectory in group.trajectories]
    damaged[1].turns[2].completion.token_ids = None
    damaged[1].turns[2].completion.logprobs = None
    text_only = Group(group.question, damaged)
    with pytest.raises(AssertionError, match=r"q1/1 turn 2: a reply came as text only"):
        rows_of_groups([text_only], lambda t: turn_rows(t, renderer, images))
    with pytest.raises(AssertionError, match=r"q1/1: a reply came as text only"):
        rows_of_groups([text_only], lambda t: [trajectory_row(t, renderer, images)])


def test_turn_rows_without_log_probabilities_and_odd_advantages_are_named(stage):
    row = rows_for(stage, "turn")[0].row
    check_policy_row(row)
    with pytest.raises(AssertionError, match=r"q1/0 turn 0: it has no log-probabilities"):
        check_policy_row(dataclasses.replace(row, old_logprobs=None))
    with pytest.raises(AssertionError, match=r"q1/0 turn 0: its advantage is nan"):
        check_policy_row(dataclasses.replace(row, advantage=float("nan")))
    # Trajectory rows are scored again before the update and need none.
    check_policy_row(dataclasses.replace(row, turn_index=None, old_logprobs=None))


def test_turn_rows_over_the_limit_are_counted(stage):
    renderer, images, group, _ = stage
    lengths = sorted(len(item.row.input_ids) for item in rows_for(stage, "turn"))

    def count(build, max_length):
        step = rows_of_groups([group], build, max_length=max_length)
        return len(step.rows), step.rows_over_length

    def turns(trajectory):
        return turn_rows(trajectory, renderer, images)

    def whole(trajectory):
        return [trajectory_row(trajectory, renderer, images, max_length=4)]

    over = sum(length > lengths[2] for length in lengths)
    assert over > 0
    assert count(turns, lengths[2]) == (len(lengths) - over, over)
    assert count(turns, None) == (len(lengths), 0)
    assert count(whole, 4) == (0, 3)
