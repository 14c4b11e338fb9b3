"""The comparison of credit modes, from metrics written by hand."""

import csv
import json

import pytest

from scripts.study_credit import MODES, bands, gap_table, plot, read_curves, write_csv


def write_run(study, seed, policy, rewards, gap):
    folder = study / f"seed{seed}" / "policy" / policy
    folder.mkdir(parents=True)
    lines = [
        {
            "step": step, "reward": reward, "accuracy": 0.5, "verification_share": None,
            "logprob_gap_mean": gap, "logprob_gap_max": 2 * gap, "kl": 0.0, "rows": 4, "trained_tokens": 9,
            "seconds": {"update": 1.0},
        }
        for step, reward in enumerate(rewards, start=1)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def study(tmp_path):
    for seed, shift in ((0, 0.0), (1, 0.2)):
        write_run(tmp_path, seed, MODES["turn"], [shift, 0.4 + shift], 0.0)
        write_run(tmp_path, seed, MODES["trajectory"], [shift, shift], 0.25 * (seed + 1))
    return tmp_path


def test_curves_of_both_modes_as_csv_and_picture(study):
    pytest.importorskip("matplotlib")
    curves = read_curves(study)
    write_csv(study / "credit.csv", curves)
    rows = list(csv.DictReader((study / "credit.csv").open()))
    assert len(rows) == 8
    assert rows[1]["credit"] == "turn"
    assert [float(row["reward"]) for row in rows if row["credit"] == "turn"] == [0.0, 0.4, 0.2, 0.6]
    assert rows[0]["verification_share"] == ""
    for lines in [lines for by_seed in curves.values() for lines in by_seed.values()]:
        for line in lines:
            line |= {"verification_share": 0.1, "invalid_action_rate": 0.0}
    plot(study / "credit.png", curves)
    assert (study / "credit.png").stat().st_size > 10_000


def test_band_is_the_range_of_the_seeds_moving_means(study):
    steps, low, mean, high = bands(read_curves(study)["turn"], "reward")
    assert steps == [1, 2]
    assert low == pytest.approx([0.0, 0.2])
    assert mean == pytest.approx([0.1, 0.3])
    assert high == pytest.approx([0.2, 0.4])


def test_gap_is_averaged_over_steps_then_seeds(study):
    rows = {row[0]: row for row in gap_table(read_curves(study)).rows}
    assert rows["trajectory"][2].mean == pytest.approx(0.375)
    assert rows["trajectory"][2].by_seed == {0: 0.25, 1: 0.5}
    assert rows["turn"][2].mean == 0.0


def test_a_mode_without_a_run_is_named(study, tmp_path_factory):
    with pytest.raises(ValueError, match="'grpo'"):
        read_curves(tmp_path_factory.mktemp("empty"))
