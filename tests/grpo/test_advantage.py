import json
import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.advantage import group_advantages, is_degenerate

CASES = Path(__file__).parents[2].parent / "shared" / "cases" / "files" / "grpo_cases.json"


def cases() -> dict:
    if not CASES.exists():
        pytest.skip("the shared cases folder is not here")
    return json.loads(CASES.read_text())


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_identical_rewards_give_exactly_zero(scale):
    for group in cases()["E1a_identical_rewards_fp32"]["groups"]:
        assert group_advantages(group, scale) == [0.0] * len(group)


def test_rewards_equal_up_to_rounding_give_zero():
    assert group_advantages([0.3, 0.1 + 0.2, 0.3]) == [0.0, 0.0, 0.0]
    assert 0.3 != 0.1 + 0.2


def test_group_of_one_gives_zero():
    for group in cases()["E1b_group_of_one"]["rewards"]:
        assert group_advantages(group) == [0.0]
    assert group_advantages([None, 0.7, None]) == [None, 0.0, None]
    assert group_advantages([]) == []


def test_unscored_sample_leaves_mean_and_std():
    case = cases()["E1c_missing_reward"]
    (rewards,) = case["rewards"]
    advantages = group_advantages(rewards)
    assert advantages[2] is None
    filled = [advantage or 0.0 for advantage in advantages]
    assert filled == pytest.approx(case["right"]["advantage_sample_std"], abs=1e-4)
    centred = group_advantages(rewards, "none")
    assert centred[0] == pytest.approx(1 - case["right"]["scored_mean"], abs=1e-6)


def test_batch_scaling_divides_by_the_deviation_of_all_scored_rewards():
    groups = [[1.0, None, 0.0], [0.25, 0.25, None], [-1.0, 0.0, 0.5]]
    everyone = [reward for group in groups for reward in group]
    scored = [reward for reward in everyone if reward is not None]
    std = statistics.stdev(scored)
    assert group_advantages(groups[0], "batch", everyone) == pytest.approx([0.5 / std, None, -0.5 / std])
    assert group_advantages(groups[1], "batch", everyone) == [0.0, 0.0, None]
    third = group_advantages(groups[2], "batch", everyone)
    assert third == pytest.approx([(r + 0.5 / 3) / std for r in groups[2]])
    assert group_advantages(groups[2], "batch", everyone[::-1]) == third  # to the bit
    assert group_advantages(groups[2], "batch") == group_advantages(groups[2], "group")


def test_nan_reward_is_refused():
    with pytest.raises(ValueError, match="not a finite number"):
        group_advantages([0.1, math.nan])


@given(st.lists(st.one_of(st.none(), st.floats(-2, 2)), max_size=8))
def test_matches_the_statistics_module(rewards):
    scored = [r for r in rewards if r is not None]
    got = group_advantages(rewards)
    if len(scored) < 2 or max(scored) - min(scored) < 1e-6:
        assert is_degenerate(rewards)
        assert all(a in (0.0, None) for a in got)
        return
    mean, std = statistics.fmean(scored), statistics.stdev(scored)
    expected = [None if r is None else (r - mean) / std for r in rewards]
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or a == pytest.approx(b, abs=1e-6)
