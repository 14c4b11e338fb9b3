"""Figures of a run folder of the slide world."""

import json

import pytest
from study_helpers import (
    GOLD,
    OTHER,
    QUESTION,
    READ,
    SLIDES,
    UNVERIFIED,
    VERIFIED,
    answer,
    episode,
    search,
    trajectory,
)

from rollout.results import result_row
from scripts.slide_metrics import (
    cause_counts,
    fact_figures,
    main,
    read_run,
    reading_figures,
    run_figures,
    task_figures,
)

ABSENT_THEN_GOLD = (
    (search(), OTHER),
    (search(f"{READ[OTHER]} profit not found ."), GOLD),
    (answer(f"{READ[GOLD]} profit 4 . the answer is 4 .", "4"), None),
)
GUESS = (search(), OTHER), (answer("amber fox , sales 1 . profit 4 .", "4"), None)


def test_task_figures_count_a_lucky_guess_in_accuracy_alone():
    figures = task_figures([episode(*steps) for steps in (VERIFIED, UNVERIFIED, ABSENT_THEN_GOLD, GUESS)])
    assert figures["n"] == 4
    assert figures["accuracy"] == 1.0
    assert figures["accuracy, complete"] == 0.75
    assert figures["Δ=1"] == 0.25
    assert figures["Δ=0"] == 0.5
    assert figures["reward"] == pytest.approx((1 + 0.5 + 0.5 - 1) / 4)


def test_reading_is_split_by_kind_of_page():
    figures = reading_figures([episode(*steps) for steps in (VERIFIED, ABSENT_THEN_GOLD, GUESS)])
    assert figures["pages"] == 5
    assert figures["read exactly"] == pytest.approx(4 / 5)
    assert figures["gold pages"] == 1.0
    assert figures["other pages"] == pytest.approx(2 / 3)
    assert figures["- before the gold page"] == 0.5
    assert figures["- after it (verification)"] == 1.0


def test_no_page_has_no_share():
    assert reading_figures([])["read exactly"] is None


def test_facts_by_kind_of_page():
    figures = fact_figures([episode(*steps) for steps in (VERIFIED, ABSENT_THEN_GOLD, GUESS)])
    absent, gold, after = figures.values()
    assert (absent["n"], absent["not found"], absent["claims a value"]) == (2, 0.5, 0.5)
    assert (gold["n"], gold["right value"], gold["not found"]) == (2, 1.0, 0.0)
    assert (after["n"], after["right value"], after["wrong value"]) == (1, 1.0, 0.0)


def test_causes_add_up_to_the_errors():
    counts = cause_counts([episode(*steps) for steps in (VERIFIED, GUESS, ((search(), GOLD),))])
    assert counts.pop("errors") == 2
    assert counts.pop("no answer") == counts.pop("claimed on a page without the fact") == 1
    assert set(counts.values()) == {0}


def test_multi_hop_is_apart():
    multi = QUESTION.model_copy(update={"tags": {"hop": "multi"}})
    figures = run_figures([episode(*VERIFIED), episode(*GUESS, question=multi)])
    assert figures["single-hop"]["n"] == figures["multi-hop"]["n"] == 1
    assert figures["multi-hop"]["accuracy, complete"] == 0.0
    assert "multi-hop" not in run_figures([episode(*VERIFIED)])


@pytest.fixture
def run(tmp_path):
    """A run folder of two samples of one question, and its slides."""
    made = [trajectory(*VERIFIED), trajectory(*GUESS, sample=1)]
    made[0].turns[0].completion.prompt_token_ids = [1, 2, 3]
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "trajectories.jsonl").write_text("".join(t.model_dump_json() + "\n" for t in made))
    rows = [result_row(t, QUESTION) for t in made]
    (folder / "results.jsonl").write_text("".join(row.model_dump_json() + "\n" for row in rows))
    slides = [
        {"page_id": s.page_id, "name": s.name, "facts": s.facts, "see_also": s.see_also}
        for s in SLIDES.values()
    ]
    (tmp_path / "slides.jsonl").write_text("".join(json.dumps(slide) + "\n" for slide in slides))
    return folder


def test_samples_of_a_question_keep_their_own_rows(run):
    first, second = read_run(run, SLIDES)
    assert (first.row.delta, second.row.delta) == (1, None)
    assert (first.prompt_tokens, second.prompt_tokens) == ([3], [])


def test_command_prints_markdown_and_writes_json(run, capsys):
    output = run.parent / "figures.json"
    main([str(run), "--slides", str(run.parent / "slides.jsonl"), "--json", str(output)])
    assert "| accuracy, complete" in capsys.readouterr().out
    assert json.loads(output.read_text())["run"]["single-hop"]["accuracy, complete"] == 0.5


def test_command_names_what_is_missing(run, capsys):
    with pytest.raises(SystemExit):
        main([str(run), "--slides", str(run / "none.jsonl")])
    assert "none.jsonl" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(run.parent), "--slides", str(run.parent / "slides.jsonl")])
    assert "results.jsonl" in capsys.readouterr().err
