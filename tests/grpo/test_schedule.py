import json
from collections import Counter
from pathlib import Path

import pytest

from grpo.schedule import step_items

CASES = Path(__file__).parents[2].parent / "shared" / "cases" / "files" / "resume_case.json"


def test_each_epoch_holds_every_item_once():
    seen = [item for step in range(1, 7) for item in step_items(range(12), step, 2, seed=3)]
    assert sorted(seen) == list(range(12))
    again = [item for step in range(7, 13) for item in step_items(range(12), step, 2, seed=3)]
    assert sorted(again) == list(range(12))
    assert seen != again


def test_a_step_runs_over_the_end_of_an_epoch():
    seen = Counter(item for step in range(1, 6) for item in step_items("abcde", step, 2, seed=1))
    assert set(seen.values()) == {2}


def test_resumed_steps_see_the_same_samples():
    if not CASES.exists():
        pytest.skip("the shared cases folder is not here")
    case = json.loads(CASES.read_text())
    unbroken = [step_items(case["samples"], s, case["batch"], seed=5) for s in range(1, 2 * case["steps"])]
    for stop in case["stop_after"]:
        resumed = [
            step_items(case["samples"], s, case["batch"], 5) for s in range(stop + 1, 2 * case["steps"])
        ]
        assert resumed == unbroken[stop:]


def test_seeds_differ_and_nothing_to_draw_is_refused():
    assert step_items(range(50), 1, 10, seed=1) != step_items(range(50), 1, 10, seed=2)
    with pytest.raises(ValueError, match="nothing"):
        step_items([], 1, 2, seed=0)
