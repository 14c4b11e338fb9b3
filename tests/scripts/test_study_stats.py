"""Means over seeds and paired differences."""

import numpy as np
import pytest
from study_helpers import UNVERIFIED, VERIFIED, episode

from rollout.compare import bootstrap_interval
from scripts.study_stats import MEASURES, measured, paired_difference, seed_mean


def pairs(values: dict[int, list[float]], below: float = 1.0) -> dict:
    return {(seed, f"q{i}"): (v, below) for seed, vs in values.items() for i, v in enumerate(vs)}


def test_seed_mean_leaves_out_seeds_without_the_figure():
    assert seed_mean({0: 0.2, 1: 0.4, 2: None}).mean == pytest.approx(0.3)
    assert seed_mean({0: None}).mean is None


def test_the_difference_is_second_minus_first_and_is_paired():
    first = pairs({0: [0, 0, 1], 1: [1, 1, 1]})
    second = pairs({0: [1, 0, 1], 1: [1, 1, 1]}) | {(2, "q0"): (0.0, 1.0)}
    result = paired_difference(first, second)
    assert result.difference == pytest.approx(1 / 6)
    assert (result.questions, result.pairs) == (3, 6)
    assert result.by_seed == {0: pytest.approx(1 / 3), 1: 0.0}
    assert result.low <= result.difference <= result.high


def test_one_seed_gives_the_bootstrap_of_rollout_compare():
    """Another random stream, so the ends agree to the noise of 10,000 resamples."""
    rng = np.random.default_rng(0)
    one, two = rng.random(200), rng.random(200)
    result = paired_difference(pairs({0: list(one)}), pairs({0: list(two)}))
    low, high = bootstrap_interval(two - one)
    assert result.difference == pytest.approx(float(np.mean(two - one)))
    assert (result.low, result.high) == (pytest.approx(low, abs=0.004), pytest.approx(high, abs=0.004))


def test_seeds_that_answer_alike_do_not_narrow_the_interval():
    """The question is what is drawn: three copies of a seed are no more evidence than one."""
    values = list(np.random.default_rng(1).integers(0, 2, 100).astype(float))
    one = paired_difference(pairs({0: [0.0] * 100}), pairs({0: values}))
    zeros = dict.fromkeys(range(3), [0.0] * 100)
    three = paired_difference(pairs(zeros), pairs(dict.fromkeys(range(3), values)))
    assert three.pairs == 3 * one.pairs
    assert (three.low, three.high) == (pytest.approx(one.low), pytest.approx(one.high))


def test_shares_with_denominators_are_pooled():
    first = {(0, "a"): (1.0, 1.0), (0, "b"): (0.0, 3.0)}
    second = {(0, "a"): (2.0, 2.0), (0, "b"): (1.0, 2.0)}
    assert paired_difference(first, second).difference == pytest.approx(3 / 4 - 1 / 4)


def test_nothing_in_common_has_no_difference():
    assert paired_difference(pairs({0: [1]}), pairs({1: [1]})).difference is None
    assert paired_difference({(0, "a"): (0.0, 0.0)}, {(0, "a"): (1.0, 1.0)}).low is None


def test_measures_of_an_episode():
    made = episode(*VERIFIED)
    assert {name: measure(made) for name, measure in MEASURES.items()} == {
        "accuracy": (1, 1),
        "accuracy, complete": (1, 1),
        "Δ=1": (1, 1),
        "reward": (1, 1),
        "read exactly": (2, 2),
    }
    unscored = episode(*UNVERIFIED)
    unscored.row.reward = None
    assert MEASURES["reward"](unscored) == (0, 0)


def test_several_samples_of_a_question_are_refused():
    with pytest.raises(ValueError, match="more than one sample"):
        measured({0: [episode(*VERIFIED), episode(*UNVERIFIED)]}, MEASURES["accuracy"])
