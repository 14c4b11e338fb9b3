import json
from itertools import product

import numpy as np
import pytest

from rollout.compare import bootstrap_interval, compare, mcnemar_exact, render
from rollout.compare_folders import compare_runs
from rollout.manifest import RunManifest, open_run
from rollout.results import ResultRow


def rows(verdicts, rewards=None, prefix="q", sample_index=0):
    rewards = rewards or [None] * len(verdicts)
    return [
        ResultRow(
            question_id=f"{prefix}{i}",
            sample_index=sample_index,
            system="visor",
            question="?",
            answer="a",
            verdict=verdict,
            reward=reward,
        )
        for i, (verdict, reward) in enumerate(zip(verdicts, rewards, strict=True))
    ]


def test_mcnemar_equals_counting_all_coin_tosses():
    for b, c in product(range(6), repeat=2):
        n = b + c
        as_extreme = sum(min(sum(t), n - sum(t)) <= min(b, c) for t in product((0, 1), repeat=n))
        assert mcnemar_exact(b, c) == pytest.approx(as_extreme / 2**n)
    assert mcnemar_exact(0, 6) == pytest.approx(2 / 64)
    assert mcnemar_exact(2000, 2000) == 1.0
    assert 0 < mcnemar_exact(900, 1100) < 0.001


def test_bootstrap_interval_is_close_to_the_normal_one_and_repeatable():
    deltas = np.random.default_rng(3).normal(0.2, 1.0, size=400)
    low, high = bootstrap_interval(deltas, seed=1)
    half = 1.96 * deltas.std() / np.sqrt(len(deltas))
    assert low == pytest.approx(deltas.mean() - half, abs=0.01)
    assert high == pytest.approx(deltas.mean() + half, abs=0.01)
    assert (low, high) == bootstrap_interval(deltas, seed=1)
    assert bootstrap_interval([0.5] * 7) == (0.5, 0.5)


def test_paired_differences_by_hand():
    """q0, q1 right in both; q2 only in b; q3 in none; the pairs go by question, not by position."""
    a = rows([True, True, False, False], [1.0, 1.0, 0.0, None])
    b = list(reversed(rows([True, True, True, False], [1.0, 1.0, 1.0, 1.0])))
    comparison = compare({"a": a, "b": b}, resamples=500)
    accuracy, reward = comparison.differences
    assert (accuracy.difference, accuracy.only_first, accuracy.only_second) == (0.25, 0, 1)
    assert accuracy.p_value == 1.0
    assert accuracy.low == 0.0
    assert (reward.n, reward.difference) == (3, pytest.approx(1 / 3)), "unscored is left out, not 0"
    assert comparison.runs["a"]["accuracy"] == 0.5


def test_a_failed_question_is_wrong_and_stays():
    a = rows([True, True])
    b = [a[0], ResultRow(question_id="q1", system="visor", question="?", error="policy: E: down")]
    comparison = compare({"a": a, "b": b}, resamples=100)
    assert comparison.differences[0].difference == -0.5
    assert comparison.differences[1].difference is None


def test_questions_not_in_every_run_are_left_out_and_counted():
    comparison = compare({"a": rows([True] * 3), "b": rows([True] * 5), "c": rows([False] * 4)}, resamples=50)
    assert comparison.common_questions == 3
    assert [note.split(":")[0] for note in comparison.notes] == ["b", "c"]
    assert len(comparison.differences) == 6
    with pytest.raises(ValueError, match="no question in common"):
        compare({"a": rows([True]), "b": rows([True], prefix="other")})
    with pytest.raises(ValueError, match="two runs"):
        compare({"a": rows([True])})


def test_several_samples_enter_with_their_mean_and_without_mcnemar():
    a = rows([True]) + rows([False], sample_index=1)
    comparison = compare({"a": a, "b": rows([True])}, resamples=50)
    assert comparison.differences[0].difference == 0.5
    assert comparison.differences[0].p_value is None


def test_compare_runs_notes_differing_judges(tmp_path):
    for name, judge, verdicts in (("one", "rule", [True, False]), ("two", "model", [True, True])):
        open_run(tmp_path / name, RunManifest(judge=judge))
        lines = [row.model_dump_json() for row in rows(verdicts)]
        (tmp_path / name / "results.jsonl").write_text("\n".join(lines) + "\n")
    comparison = compare_runs([tmp_path / "one", tmp_path / "two"], resamples=50)
    assert comparison.notes == ["the runs differ in their judge: one rule, two model"]
    assert json.loads(render(comparison, "json"))["differences"][0]["difference"] == 0.5
    assert "two − one" in render(comparison)
    assert "| run |" in render(comparison, "markdown").replace("  ", " ").replace("  ", " ")
    with pytest.raises(ValueError, match="holds no results"):
        compare_runs([tmp_path, tmp_path / "one"])
    with pytest.raises(ValueError, match="given twice"):
        compare_runs([tmp_path / "one", tmp_path / "one"])
