"""How rows become passes: limits, order, padding, and that none of it changes the gradient."""

import random
from itertools import chain

import pytest
from update_stage import largest_difference, make_stage, rows_for, updated

from grpo.loss import LossSettings
from grpo.micro_batches import MOST_PADDING, MicroBatching, Padding
from rollout.rows import TrainingRow


@pytest.fixture(scope="module")
def stage(world):
    return make_stage(world)


@pytest.mark.parametrize(("rows", "max_tokens"), [(1, None), (4, None), (64, 700), (3, 350), (64, None)])
def test_every_row_once_within_the_limits(rows, max_tokens):
    rng = random.Random(0)
    lengths = [rng.randint(5, 600) for _ in range(200)]
    batches = MicroBatching(rows, max_tokens).split(lengths, lambda length: length)
    assert sorted(list(chain.from_iterable(batches))) == sorted(lengths)
    flat = list(chain.from_iterable(batches))
    assert flat == sorted(lengths, reverse=True)
    for batch in batches:
        padded = len(batch) * batch[0]
        assert len(batch) <= rows
        assert max_tokens is None or padded <= max_tokens or len(batch) == 1
        assert padded - sum(batch) <= MOST_PADDING * padded


def test_equal_rows_fill_a_pass():
    assert MicroBatching(8).split([7] * 20, int) == [[7] * 8, [7] * 8, [7] * 4]
    assert MicroBatching(8, 21).split([7] * 7, int) == [[7] * 3, [7] * 3, [7]]
    assert MicroBatching(8, 5).split([7, 7], int) == [[7], [7]]  # too long for any pass: alone
    assert MicroBatching(8).split([], int) == []


def test_padding_is_counted():
    row = lambda length: TrainingRow(input_ids=[0] * length, loss_mask=[0] * length)  # noqa: E731
    padding = Padding()
    assert padding.share == 0
    padding.add([row(10), row(7), row(4)])
    padding.add([row(5)])
    assert (padding.tokens, padding.pads) == (35, 9)
    assert (padding + padding).share == pytest.approx(9 / 35)


@pytest.mark.parametrize("credit", ["trajectory", "turn"])
def test_a_token_budget_changes_nothing(stage, credit):
    rows = rows_for(stage, credit)
    settings = LossSettings(beta=0.1)
    weights, report = updated(stage, rows, credit, settings, micro_batch_size=1)
    assert report.padding.pads == 0
    assert report.padding.tokens == sum(len(item.row.input_ids) for item in rows)
    longest = max(len(item.row.input_ids) for item in rows)
    for budget in (1, longest, 3 * longest):
        other, other_report = updated(
            stage, rows, credit, settings, micro_batch_size=100, max_tokens_per_micro_batch=budget
        )
        assert largest_difference(weights, other) < 1e-6
        assert other_report.loss == pytest.approx(report.loss, abs=1e-6)
        assert other_report.padding.share <= MOST_PADDING
