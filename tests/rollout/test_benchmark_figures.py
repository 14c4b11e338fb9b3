"""The benchmarks' own figures over rows, and the scorers through the whole command."""

import json

import pytest

from rollout.benchmark_figures import benchmark_figures
from rollout.evaluate import EvaluateConfig, evaluate
from rollout.metrics import summarise
from rollout.results import ResultRow


def row(number, judge, **fields):
    return ResultRow(question_id=f"q{number}", system="visor", question="Q?", judge=judge, **fields)


def graded(number, gold, answer, score):
    return row(number, "mmlongbench", gold_answers=[gold], answer=answer, score=score, verdict=score > 0)


def test_mmlongbench_f1_by_hand():
    rows = [
        graded(1, "5", "5", 1.0),
        graded(2, "abcd", "abxd", 0.75),
        graded(3, "7", "Not answerable", 0.0),
        graded(4, "Not answerable", "I could not find it.", 1.0),
        graded(5, "Not answerable", "8", 0.0),
        row(6, "mmlongbench", gold_answers=["9"], error="policy: X: down"),
    ]
    figures = benchmark_figures(rows)["mmlongbench"]
    recall, precision = 1.75 / 4, 1.75 / 4  # four answerable; all but q3 and q4 predict something
    assert figures == {
        "n": 6,
        "accuracy": pytest.approx(2.75 / 6),
        "recall": recall,
        "precision": precision,
        "f1": pytest.approx(1.75 / 4),
    }
    assert benchmark_figures(rows[3:4])["mmlongbench"]["f1"] is None


def test_slidevqa_figures_by_hand():
    rows = [
        row(1, "slidevqa", gold_answers=["5"], answer="5", verdict=True, score=1.0,
            gold_page_ids=["p1"], shown_page_ids=["p1"]),
        row(2, "slidevqa", gold_answers=["red car"], answer="car", verdict=False, score=2 / 3,
            gold_page_ids=["p1", "p2"], shown_page_ids=["p1", "p3"]),
        row(3, "slidevqa", gold_answers=["x"], error="policy: X: down", gold_page_ids=["p4"]),
        row(4, "slidevqa", gold_answers=["y"], answer="y", verdict=True, score=1.0),
    ]  # fmt: skip
    figures = benchmark_figures(rows)["slidevqa"]
    assert (figures["n"], figures["exact_match"]) == (4, 0.5)
    assert figures["f1"] == pytest.approx((1 + 2 / 3 + 0 + 1) / 4)
    assert figures["evidence_exact_match"] == pytest.approx(1 / 3)
    assert figures["evidence_f1"] == pytest.approx((1 + 0.5) / 3)
    assert figures["joint_exact_match"] == pytest.approx(1 / 3)
    precision, recall = 1 * 0.5, 0.5 * 0.5
    assert figures["joint_f1"] == pytest.approx((1 + 2 * precision * recall / (precision + recall)) / 3)


def test_other_judges_have_no_such_figures_and_are_counted():
    metrics = summarise([row(1, "rule", answer="5", verdict=True), row(2, "model:m", answer="5")])
    assert metrics["benchmark"] == {}
    assert metrics["judges"] == {"rule": 1, "model:m": 1}
    assert metrics["mean_score_when_judged"] is None


@pytest.mark.parametrize("judge", ["mmlongbench", "slidevqa"])
def test_a_run_with_the_scorer_of_a_benchmark(judge, world, client, tmp_path):
    config = EvaluateConfig(
        corpus=str(world.corpus),
        benchmark=world.questions,
        output=str(tmp_path / "run"),
        judge=judge,
        episode={"prompts": "tiny", "max_turns": 5},
    )
    metrics = evaluate(config, client)
    assert metrics["accuracy"] == 0.75
    assert metrics["benchmark"][judge]["n"] == 4
    rows = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    assert {row["judge"] for row in rows} == {judge}
    assert sorted(row["score"] for row in rows) == [0.0, 1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="unknown judge 'slide'; known: rule, mmlongbench, slidevqa, or"):
        evaluate(config.model_copy(update={"judge": "slide"}), client)
