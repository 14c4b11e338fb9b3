"""The updates of one step: old log-probabilities, padding, steps without rows, auxiliary rows."""

import pytest
import torch
from accelerate import Accelerator
from update_stage import largest_difference, make_stage, policy_update, rows_for, updated

from grpo.loss import LossSettings
from grpo.update import UpdateReport
from visor.models.loading import load_model
from visor.models.tensors import collate, forward_logprobs


@pytest.fixture(scope="module")
def stage(world):
    return make_stage(world)


def test_several_updates_score_the_old_policy_before_the_first(stage):
    rows = rows_for(stage, "trajectory")
    _, single = updated(stage, rows, settings=LossSettings(), micro_batch_size=1)
    _, several = updated(
        stage, rows, settings=LossSettings(epsilon=0.01), micro_batch_size=1, gradient_accumulation_steps=1,
        num_iterations=3,
    )  # fmt: skip
    assert len(several.loss) == 9
    assert single.stats.clipped == 0
    assert several.stats.clipped > 0
    assert several.gap_tokens == single.gap_tokens == sum(item.tokens for item in rows)
    assert several.gap_sum == pytest.approx(single.gap_sum, rel=1e-4)


def test_an_update_without_rows_does_nothing(stage):
    weights, report = updated(stage, [])
    assert largest_difference(weights, dict(load_model(stage[3]).named_parameters())) == 0
    assert report.loss == [0.0]


def test_updates_whose_rows_have_no_gradient_are_skipped(stage):
    """Without a KL term two of the three updates have nothing to train; the old policy was scored before."""
    rows = rows_for(stage, "trajectory")
    options = {"settings": LossSettings(), "gradient_accumulation_steps": 1}
    rows[1].row.advantage = rows[2].row.advantage = 0.0
    weights, report = updated(stage, rows, **options)
    assert len(report.loss) == 3
    assert sum(norm > 0 for norm in report.grad_norm) == 1
    alone, _ = updated(stage, rows[:1], **options)
    assert largest_difference(weights, alone) < 1e-6


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 1, "num_iterations": 2}])
@pytest.mark.parametrize("credit", ["trajectory", "turn"])
def test_padding_for_a_process_with_more_rows_changes_nothing(stage, monkeypatch, credit, options):
    rows = rows_for(stage, credit)[:2]
    expected, report = updated(stage, rows, credit, **options)

    def gather(values):
        """As if another process had one micro-batch more in every update, of rows that weigh nothing."""
        return [*values, values[0] + 1] if isinstance(values[0], int) and values[0] else values

    monkeypatch.setattr("grpo.update.gather_object", gather)
    weights, padded = updated(stage, rows, credit, **options)
    assert largest_difference(weights, expected) < 1e-6
    assert padded.stats.tokens == report.stats.tokens


def test_no_row_and_no_auxiliary_row_leave_the_weights_to_the_bit(stage):
    """AdamW's momentum would move them on its own."""
    rows = rows_for(stage, "trajectory")
    update = policy_update(stage, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    update.run(rows, [], seed=0)
    before = {name: p.detach().clone() for name, p in update.model.named_parameters()}
    report = update.run([], [], seed=0)
    assert (report.loss, report.grad_norm) == ([0.0], [0.0])
    assert largest_difference(before, dict(update.model.named_parameters())) == 0
    report = update.run([], [item.row for item in rows], seed=0)
    assert report.auxiliary_loss[0] > 0


def test_the_gap_is_measured_before_the_policy_moves(stage):
    """Turn rows are exactly what was sampled; a later update must not be taken for a broken row."""
    rows = rows_for(stage, "turn")
    _, report = updated(
        stage, rows, "turn", LossSettings(), gradient_accumulation_steps=1, max_logprob_gap=1e-4,
    )  # fmt: skip
    assert len(report.loss) == len(rows)
    assert report.gap_max < 1e-5
    assert 0 < report.gap_tokens < sum(item.tokens for item in rows)
    rows[0].row.old_logprobs = [value and value - 0.5 for value in rows[0].row.old_logprobs]
    with pytest.raises(ValueError, match="log-probabilities differ"):
        updated(stage, rows[:1], "turn", LossSettings(), max_logprob_gap=1e-4)


def test_the_old_policy_is_scored_without_dropout(stage):
    from visor.models.lora import add_lora

    renderer, images, _, path = stage
    model = add_lora(load_model(path), rank=4, alpha=64, dropout=0.5, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    update = policy_update(stage, model=model)
    model.train()
    rows = rows_for(stage, "trajectory")
    scored = update._rescored(rows)
    assert all(module.training for module in model.modules())
    model.eval()
    for item in rows:
        with torch.no_grad():
            exact = forward_logprobs(model, collate([item.row], renderer, images))[0]
        assert torch.allclose(scored[id(item)], exact, atol=1e-5)


class TwoProcesses(Accelerator):
    num_processes = 2


def test_the_auxiliary_loss_does_not_depend_on_the_number_of_processes(stage, monkeypatch):
    """Shares of 1 and 2 rows of other lengths; what data parallelism makes of gradients is their mean."""
    rows = [item.row for item in rows_for(stage, "trajectory")]
    tokens = [sum(row.loss_mask) for row in rows]
    assert tokens[0] * 2 != tokens[1] + tokens[2]

    def gradients(part, **options):
        update = policy_update(stage, auxiliary_weight=0.3, **options)
        loss = update._auxiliary_backward(part, sum(tokens), UpdateReport())
        return loss, {name: p.grad for name, p in update.model.named_parameters() if p.grad is not None}

    loss, whole = gradients(rows)
    shares = [gradients(part, accelerator=TwoProcesses(cpu=True)) for part in (rows[:1], rows[1:])]
    assert sum(share for share, _ in shares) == pytest.approx(loss, rel=1e-5)
    for name, gradient in whole.items():
        total = sum(part.get(name, 0) for _, part in shares)  # a row without a picture: no vision gradient
        assert torch.allclose(total / 2, gradient, atol=1e-6), name
    # A process without a row takes part with nothing; the token count comes from the other.
    monkeypatch.setattr(
        "grpo.update.gather_object", lambda values: [values[0] + 5] if values == [0] else values
    )
    report = policy_update(stage, auxiliary_weight=0.3).run([], [], seed=0)
    assert report.auxiliary_loss == [0.0]
