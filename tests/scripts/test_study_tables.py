"""The study's tables from run folders made by hand, and their text."""

import json

import pytest
from study_helpers import GOLD, OTHER, QUESTION, READ, THIRD, UNVERIFIED, VERIFIED, answer, episode, search

from scripts.study_curves import mean_curve
from scripts.study_depth import depth, depth_class, fixed_episodes
from scripts.study_stats import PairedDifference, SeedMean
from scripts.study_tables import ablation_tables, depth_tables, fact_tables, grpo_tables, task_tables
from scripts.study_targets import target_table
from scripts.study_text import BEGIN, END, Table, as_json, cell_text, render, replace_marked
from visor.retrieval.base import ScoredPage


class Ranked:
    name = "ranked"

    def __init__(self, *pages):
        self.pages = pages

    def search(self, query, k):
        assert query == QUESTION.text
        return [ScoredPage(page, -i) for i, page in enumerate(self.pages)][:k]


def test_depth_is_the_rank_of_the_last_gold_page():
    assert depth(QUESTION, Ranked(OTHER, GOLD, THIRD)) == 2
    both = QUESTION.model_copy(update={"gold_page_ids": [GOLD, THIRD]})
    assert depth(both, Ranked(GOLD, OTHER, THIRD)) == 3
    assert depth(QUESTION, Ranked(OTHER, GOLD), top_k=1) is None
    assert [depth_class(d) for d in (1, 3, 4, 9, None)] == ["1", "3", "≥4", "≥4", "not listed"]


def test_the_fixed_policy_is_scored_here(tmp_path):
    from study_helpers import trajectory

    steps = (search(), GOLD), (search(), OTHER), (answer("the answer is 4 .", "4"), None)
    made = trajectory(*steps)
    made.reward = None
    path = tmp_path / "t.jsonl"
    path.write_text(made.model_dump_json() + "\n")
    (found,) = fixed_episodes(path, {QUESTION.question_id: QUESTION}, [QUESTION.question_id])
    assert (found.row.reward, found.row.delta) == (1.0, 1)
    assert fixed_episodes(path, {}, []) == []


def runs():
    """SFT never verifies; GRPO does in both seeds; with window 1 it does not."""
    sft, grpo = episode(*UNVERIFIED), episode(*VERIFIED)
    return {
        "sft-sampled": {0: [sft], 1: [sft]},
        "grpo-sampled": {0: [grpo], 1: [grpo]},
        "grpo-window1-sampled": {0: [sft], 1: [sft]},
    }


def cell(table: Table, row: str, column: str):
    return next(r for r in table.rows if r[0] == row)[table.header.index(column)]


def test_task_table_has_a_row_for_each_policy_and_none_for_an_ablation():
    single, multi = task_tables(runs())
    assert [row[0] for row in single.rows] == ["sft-sampled", "grpo-sampled"]
    assert cell(single, "grpo-sampled", "Δ=1").mean == 1.0
    assert cell(single, "sft-sampled", "seeds") == 2
    assert not multi.rows


def test_grpo_is_compared_with_its_own_start():
    (table,) = grpo_tables(runs())
    assert [row[0] for row in table.rows] == ["grpo-sampled − sft-sampled"]
    assert cell(table, "grpo-sampled − sft-sampled", "Δ=1").difference == 1.0
    assert cell(table, "grpo-sampled − sft-sampled", "reward").difference == pytest.approx(0.5)


def test_by_depth_against_the_fixed_policy():
    steps = (search(), OTHER), (search(), THIRD), (answer("the answer is not found .", "not found"), None)
    fixed = [episode(*steps)]
    delta, reward, against = depth_tables(runs(), {QUESTION.question_id: "3"}, fixed)
    assert cell(delta, "grpo-sampled", "t*=3").mean == 1.0
    assert cell(delta, "grpo-sampled", "t*=1").mean is None
    assert cell(reward, "always two searches", "t*=3").mean == pytest.approx(-0.8)
    row = "grpo-sampled − always two searches"
    assert cell(against, row, "reward").difference == pytest.approx(1.8)
    assert "read exactly" not in against.header
    assert len(against.rows[0]) == len(against.header)


def test_causes_are_summed_over_seeds():
    wrong = episode((search(), GOLD), (answer(READ[GOLD], "5"), None))
    table = fact_tables({"sft-sampled": {0: [wrong], 1: [wrong], 2: [episode(*VERIFIED)]}})[-1]
    assert cell(table, "sft-sampled", "errors") == 2
    assert cell(table, "sft-sampled", "misread gold page") == 2


def test_ablations_are_compared_with_the_full_episode():
    figures, against = ablation_tables(runs())
    assert [row[0] for row in figures.rows] == ["full (window 2)", "window1"]
    assert cell(against, "window1 − grpo-sampled", "reward").difference == pytest.approx(-0.5)
    assert ablation_tables({"grpo-sampled": runs()["grpo-sampled"]}) == []


def test_targets_are_read_from_the_tables():
    tables = [*task_tables(runs()), *grpo_tables(runs())]
    found = {(row[0], row[1]): row[2:] for row in target_table(tables).rows}
    assert found["sft-sampled", "accuracy, complete"] == (1.0, "≥ 0.72", "yes")
    assert found["sft-sampled", "invalid actions"] == (0.0, "≤ 0.03", "yes")
    assert found["grpo-sampled − sft-sampled", "Δ=1"][2] == "yes"
    assert not any("always" in row for row, _ in found)
    worse = {name: runs()["sft-sampled"] for name in ("sft-sampled", "grpo-sampled")}
    found = {(row[0], row[1]): row[2:] for row in target_table(grpo_tables(worse)).rows}
    assert found["grpo-sampled − sft-sampled", "Δ=1"] == (0.0, "≥ 0.55", "no")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (SeedMean(0.9, {0: 0.85, 1: 0.95}), ".900 (.850–.950)"),
        (SeedMean(0.9, {0: 0.9, 1: 0.9}), ".900"),
        (SeedMean(0.9, {0: 0.9, 1: None}), ".900"),
        (SeedMean(-0.25, {0: -0.25}), "-.250"),
        (SeedMean(1.0, {0: 1.0}), "1.000"),
        (SeedMean(422.0, {0: 422, 1: 422}), "422"),
        (SeedMean(6.5, {0: 6, 1: 7}), "6–7"),
        (SeedMean(104.26, {0: 104.26}), "104.3"),
        (SeedMean(None, {0: None}), "–"),
        (PairedDifference(0.5, 0.4, 0.6, 9, 27, {}), "+.500 [+.400, +.600]"),
        (PairedDifference(None, None, None, 0, 0, {}), "–"),
        ("policy", "policy"),
        (3, "3"),
        (None, "–"),
    ],
)
def test_cells(value, text):
    assert cell_text(value) == text


def test_a_table_as_markdown_and_as_json():
    table = Table("1. T", "Why.", ("policy", "reward"), [("sft", SeedMean(0.5, {0: 0.25, 1: 0.75}))])
    assert render(table).splitlines()[0:3] == ["### 1. T", "", "Why."]
    assert ".500 (.250–.750)" in render(table)
    stored = json.loads(json.dumps(as_json(table)))
    assert stored["rows"] == [{"policy": "sft", "reward": {"mean": 0.5, "by_seed": {"0": 0.25, "1": 0.75}}}]


def test_only_the_marked_part_of_a_document_is_replaced():
    document = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    new = replace_marked(document, "new\n")
    assert new == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert replace_marked(new, "new") == new
    with pytest.raises(ValueError, match="no part between"):
        replace_marked("no marks", "new")


def test_mean_curve_takes_the_seeds_that_have_a_step():
    curve = mean_curve(
        {
            0: [{"step": 1, "reward": 0.2, "kl": None}, {"step": 2, "reward": 0.6}],
            1: [{"step": 1, "reward": 0.4}],
        }
    )
    assert [(line["step"], line["seeds"]) for line in curve] == [(1, 2), (2, 1)]
    assert [line["reward"] for line in curve] == [pytest.approx(0.3), 0.6]
    assert curve[0]["kl"] is None
