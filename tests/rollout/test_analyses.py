"""The analyses against the published tables (from counts that match them), and against slow versions."""

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from synthetic_runs import calls, counted, page, row, run, trajectory

from rollout.analyses.coverage import GROUPS, contributions, group_parts
from rollout.analyses.frame import Frame, measure
from rollout.analyses.prices import Price, money, read_prices
from rollout.analyses.registry import ANALYSES, analyse
from rollout.analyses.samples import pass_at_k
from rollout.analyses.study import Run
from rollout.analyses.table import Figure
from rollout.results import result_row
from visor.types import Question


def table(runs, name, **options):
    """The rows of one analysis, by the names of the columns, with figures as (printed) values."""
    made, lacking = analyse(runs, 50, only=[name], **options)
    assert made, lacking
    return [dict(zip(made[0].header, cells, strict=True)) for cells in made[0].rows]


def value(cell):
    """A figure as the table prints it, without its interval."""
    return cell.text().split(" [")[0] if isinstance(cell, Figure) else cell


# ---------------------------------------------------------------- published rows

DEPTH = [
    # searches, n, hits, hits right, misses right; hit, post-hit, accuracy, found-unused as published
    (1, 642, 602, 578, 23, "93.8 96.0 93.6 3.7"),
    (2, 126, 120, 110, 3, "95.2 91.7 89.7 7.9"),
    (3, 71, 57, 50, 5, "80.3 87.7 77.5 9.9"),
    (4, 84, 63, 55, 2, "75.0 87.3 67.9 9.5"),
    (7, 92, 58, 37, 1, "63.0 63.8 41.3 22.8"),
    (12, 127, 75, 39, 6, "59.1 52.0 35.4 28.3"),
]


def test_the_published_depth_table():
    """TAEC, table 2: ReAct on ViDoSeek."""
    rows = [
        item
        for searches, *counts, _ in DEPTH
        for item in counted(*counts, prefix=f"{searches}-", searches=searches)
    ]
    found = [r for r in table([run("react", rows, system="react")], "depth") if r["questions"] == "all"]
    columns = ("hit", "post-hit", "accuracy", "found-unused")
    assert [r["n"] for r in found] == [642, 126, 71, 84, 92, 127]
    assert [r["searches"] for r in found] == ["1", "2", "3", "4–5", "6–8", "9+"]
    assert [" ".join(value(r[c]) for c in columns) for r in found] == [published for *_, published in DEPTH]


def test_the_published_coverage_table():
    """TAEC, table 5, on 1142 questions."""
    runs = [
        run("react", counted(1142, 975, 869, 39), system="react"),
        run("dag", counted(1142, 964, 869, 46), system="dag"),
        run("taec", counted(1142, 1082, 980, 19), system="dag", operators="AMV"),
    ]
    found = table(runs, "coverage")
    columns = ("hit", "post-hit", "on misses", "accuracy")
    assert [" ".join(value(r[c]) for c in columns) for r in found] == [
        "85.4 89.1 23.4 79.5",
        "84.4 90.1 25.8 80.1",
        "94.7 90.6 31.7 87.5",
    ]
    assert value(found[2]["Δ accuracy"]) == "+8.0"
    assert found[0]["Δ accuracy"] is None


@pytest.mark.parametrize(
    ("n", "right", "published", "gains"),
    [
        (1142, (915, 986, 960, 954, 999), "80.1 86.3 84.1 83.5 87.5", "+6.2 +3.9 +3.4 +7.4"),
        (1000, (767, 823, 828, 824, 836), "76.7 82.3 82.8 82.4 83.6", "+5.6 +6.1 +5.7 +6.9"),
        (847, (377, 408, 400, 396, 424), "44.5 48.2 47.2 46.8 50.1", "+3.7 +2.7 +2.2 +5.5"),
    ],
)
def test_the_published_ablation(n, right, published, gains):
    """TAEC, table 7. Gains are those of the counts; two differ by rounding from those of rounded
    accuracies."""
    operators = ("", "A", "M", "V", "AMV")
    runs = [
        run(letters or "dag", counted(n, count, count, 0), system="dag", operators=letters)
        for letters, count in zip(operators, right, strict=True)
    ]
    found = table(runs, "ablation")
    assert [r["operators"] for r in found] == ["substrate", "+A", "+M", "+V", "A+M+V"]
    assert " ".join(value(r["accuracy"]) for r in found) == published
    assert " ".join(value(r["difference"]) for r in found[1:]) == gains


def test_the_published_cost_table():
    """TAEC, table 6, from 100 questions of which each has whole numbers of calls and pictures."""
    published = {
        "vanilla": (100, 490, "1.00 4.90 0.22"),
        "react": (534, 9280, "5.34 92.80 3.73"),
        "dag": (494, 2000, "4.94 20.00 0.87"),
        "taec": (291, 1470, "2.91 14.70 0.61"),
    }
    runs = []
    for name, (n_calls, n_images, text) in published.items():
        size = float(text.split()[2]) * 1e6 * 100 / n_images
        rows = []
        for index in range(100):
            count = n_calls // 100 + (index < n_calls % 100)
            pictures = n_images // 100 + (index < n_images % 100)
            each = [pictures // count + (call < pictures % count) for call in range(count)]
            item = trajectory(f"q{index}")
            item.turns = calls(each, round(size))
            rows.append(result_row(item, Question(question_id=f"q{index}", text="?")))
        runs.append(run(name, rows, system=name))
    found = table(runs, "cost")
    assert [" ".join(value(r[c]) for c in ("model calls", "images sent", "MB")) for r in found] == [
        text for _, _, text in published.values()
    ]
    assert value(found[3]["Δ calls"]) == "+1.91"


# ---------------------------------------------------------------- exactness


@pytest.mark.parametrize("seed", range(40))
def test_the_four_contributions_sum_exactly_to_the_difference(seed):
    """Whatever hits and verdicts are, with several samples and questions without gold pages too."""
    rng = np.random.default_rng(seed)
    runs = []
    gold = rng.random(23) < 0.8
    for name in "ab":
        count = int(rng.integers(1, 4))
        questions = [
            [
                row(f"q{q}", gold=bool(gold[q]), hit=rng.random() < 0.5, right=rng.random() < 0.5, sample=s)
                for s in range(count)
            ]
            for q in range(23)
        ]
        runs.append(Run(name=name, questions=questions))
    with_gold = [[rows for rows in r.questions if rows[0].gold_page_ids] for r in runs]
    accuracies = [
        measure(questions, lambda item: item.correct).value if questions else 0.0 for questions in with_gold
    ]
    parts = contributions(*runs)
    exact = [
        sum((Fraction(sum(i.correct for i in rows), len(rows)) for rows in questions), Fraction(0))
        for questions in with_gold
    ]
    total = len(with_gold[0])
    assert sum(parts.values()) == (exact[1] - exact[0]) / total
    assert float(sum(parts.values())) == pytest.approx(accuracies[1] - accuracies[0])
    members = group_parts(*runs)
    assert sum(n for group in members.values() for n, _, _ in group) == total
    shown = {r["hit by"]: r["contribution"].value for r in table(runs, "groups")}
    assert shown == pytest.approx(
        {**{k: float(v) for k, v in parts.items()}, "all": float(sum(parts.values()))}
    )


def test_four_groups_by_hand():
    a = [row("1", right=True), row("2", right=False), row("3", right=False, hit=False), row("4", hit=False)]
    b = [row("1", right=True), row("2", hit=False, right=True), row("3"), row("4", hit=False, right=False)]
    found = {r["hit by"]: r for r in table([run("a", a), run("b", b)], "groups")}
    assert {group: r["n"] for group, r in found.items()} == {
        "both": 1, "only first": 1, "only second": 1, "neither": 1, "all": 4,
    }  # fmt: skip
    shown = [value(found[group]["contribution"]) for group in (*GROUPS, "all")]
    assert shown == ["0.0", "+25.0", "+25.0", "-25.0", "+25.0"]


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_all_choices(n):
    for right in range(n + 1):
        verdicts = [True] * right + [False] * (n - right)
        for k in range(1, n + 1):
            choices = list(combinations(verdicts, k))
            assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, choices)) / len(choices))
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(n, 0, n + 1)


def test_samples_of_a_question():
    """q0: 1 of 4 right, q1: 4 of 4. Mean 62.5; pass@2 = mean of 1/2 and 1."""
    questions = [
        [row("q0", right=s == 2, sample=s) for s in range(4)],
        [row("q1", sample=s) for s in range(4)],
    ]
    found = table([Run(name="a", questions=questions)], "samples")
    assert [(r["figure"], value(r["value"])) for r in found] == [
        ("pass@1", "62.5"), ("pass@2", "75.0"), ("pass@4", "100.0"), ("mean", "62.5"),
    ]  # fmt: skip


def test_intervals_equal_the_obvious_bootstrap():
    """A ratio over a subset whose size varies, and a paired difference."""
    rng = np.random.default_rng(5)
    first, second = (
        counted_randomly(rng, 60), counted_randomly(rng, 60),
    )  # fmt: skip
    frame = Frame(60, 4000, seed=3)
    post_hit = frame.figure(first.accuracy(lambda item: item.hit))
    delta = frame.difference(first.accuracy(), second.accuracy())
    frame.resolve()
    ratios, deltas = [], []
    for _ in range(4000):
        picks = rng.integers(0, 60, size=60)
        hits = [first.questions[q][0] for q in picks if first.questions[q][0].hit]
        ratios.append(np.mean([item.correct for item in hits]))
        deltas.append(
            np.mean([second.questions[q][0].correct - first.questions[q][0].correct for q in picks])
        )
    assert (post_hit.low, post_hit.high) == pytest.approx(np.quantile(ratios, [0.025, 0.975]), abs=0.025)
    assert (delta.low, delta.high) == pytest.approx(np.quantile(deltas, [0.025, 0.975]), abs=0.025)
    assert post_hit.low < post_hit.value < post_hit.high


def counted_randomly(rng, n) -> Run:
    return run("r", [row(f"q{i}", hit=rng.random() < 0.6, right=rng.random() < 0.6) for i in range(n)])


# ---------------------------------------------------------------- each analysis by hand


@pytest.fixture
def three_runs():
    """Four questions: a reference of 1, 2, 4 and 7 searches, vanilla and a layered run."""
    reference = [
        row("1"),
        row("2", searches=2, right=False, first=True),
        row("3", searches=4, hit=False, right=False),
        row("4", searches=7, gold=False, right=True),
    ]
    vanilla = [row("1"), row("2"), row("3", right=False), row("4", gold=False, right=False)]
    taec = [row("1"), row("2", searches=2), row("3", searches=1), row("4", searches=6, gold=False)]
    return [
        run("react", reference, system="react"),
        run("vanilla", vanilla, system="vanilla"),
        run("taec", taec, system="dag", operators="AMV"),
        run("dag", reference, system="dag"),
    ]


def test_difficulty_matched_and_stopping(three_runs):
    found = table(three_runs, "difficulty")
    of_taec = [(r["searches"], r["n"], value(r["accuracy"])) for r in found if r["run"] == "taec"]
    assert of_taec == [("1", 1, "100.0"), ("2–3", 1, "100.0"), ("4–5", 1, "100.0"), ("6+", 1, "100.0")]
    assert [value(r["difference"]) for r in found if r["run"] == "vanilla"] == [
        "0.0",
        "+100.0",
        "0.0",
        "-100.0",
    ]
    matched = {r["run"]: r for r in table(three_runs, "matched")}
    assert (matched["taec"]["n"], matched["taec"]["with gold"]) == (3, 2)
    shares = ("coverage", "found-used", "found-unused", "missed-right", "missed-wrong")
    assert [value(matched["react"][s]) for s in shares] == ["50.0", "0.0", "50.0", "0.0", "50.0"]
    assert value(matched["react"]["searches"]) == "4.33"
    stopping = table(three_runs, "stopping")
    assert [(r["n"], value(r["difference"])) for r in stopping] == [(1, "0.0"), (3, "0.0")]


def test_depth_of_questions_whose_gold_page_was_retrieved_first(three_runs):
    """Retrieved is not shown: question 2 of the reference, whose second search showed it."""
    found = table(three_runs[:1], "depth")
    first = [(r["searches"], r["n"]) for r in found if r["questions"] == "gold in first five"]
    assert first == [("1", 1), ("2", 1)]


def test_price_abilities_within_and_distinct(three_runs):
    price = table(three_runs, "price")
    assert [(r["searches"], r["n"], value(r["difference"])) for r in price] == [
        ("1", 2, "+50.0"), ("2", 1, "0.0"),
    ]  # fmt: skip
    abilities = {r["run"]: r for r in table(three_runs, "abilities")}
    assert value(abilities["taec"]["over-searches"]) == "33.3"
    assert value(abilities["vanilla"]["reads"]) == "66.7"
    assert value(abilities["vanilla"]["commits without gold"]) == "25.0"
    within = {(r["run"], r["k"]): value(r["correct"]) for r in table(three_runs, "within-k")}
    assert [within["taec", k] for k in (1, 2, 3, 5, 8)] == ["50.0", "75.0", "75.0", "75.0", "100.0"]
    distinct = {r["run"]: r for r in table(three_runs, "distinct")}
    assert value(distinct["react"]["admitted a question"]) == "3.50"
    assert value(distinct["react"]["distinct share"]) == "100.0"


def test_a_repeated_page_counts_once_among_the_distinct():
    item = row("1", searches=3, hit=False)
    item.admitted_pages[2] = [page(1), page(2)]
    item.shown_page_ids = [page(1), page(2)]
    [found] = table([run("a", [item])], "distinct")
    assert value(found["distinct share"]) == "50.0"


def test_a_notice_is_no_search_and_an_unsearched_answer_is_counted():
    item = trajectory("1", searches=2)
    item.turns[1].candidates = []
    rows = [
        result_row(item, Question(question_id="1", text="?")),
        row("2", searches=0, hit=False),
    ]
    assert [r.searches for r in rows] == [1, 0]
    [found] = table([run("a", rows)], "no-search")
    assert value(found["share"]) == "50.0"


def test_types_and_unanswerable():
    tags = [
        {"hop": "single", "evidence_sources": ["Chart"]},
        {"hop": "multi", "evidence_sources": ["Chart", "Table"]},
        {"evidence_sources": [], "answerable": False},
    ]
    runs = [
        run(name, [row(f"q{i}", tags=t, right=r) for i, (t, r) in enumerate(zip(tags, right, strict=True))])
        for name, right in (("a", (True, False, True)), ("b", (False, False, False)))
    ]
    types = [(r["type"], r["run"], r["n"], value(r["accuracy"])) for r in table(runs, "types")]
    assert ("evidence: Chart", "a", 1, "100.0") in types
    assert {name for name, *_ in types} == {"hop: single", "hop: multi", "evidence: Chart"}
    found = {(r["questions"], r["run"]): value(r["accuracy"]) for r in table(runs, "unanswerable")}
    assert found["answerable", "a"] == "50.0"
    assert found["unanswerable", "a"] == "100.0"
    assert found["all", "b"] == "0.0"


def test_runs_of_two_retrievers_are_never_in_one_table(three_runs):
    other = [
        Run(
            name=f"{r.name}2", questions=r.questions, system=r.system, operators=r.operators, fingerprint="f2"
        )
        for r in three_runs[1:3]
    ]
    runs = [*three_runs, *other]
    made, lacking = analyse(runs, 20)
    for one in made:
        if one.name in ANALYSES:
            names = {str(cells[0]) for cells in one.rows}
            assert not (names & {"taec2", "vanilla2"}) or not (names & {"taec", "vanilla", "react", "dag"})
    [control] = [one for one in made if one.name == "retrievers"]
    assert [cells[1] for cells in control.rows] == ["taec", "taec2"]
    assert control.rows[1][3] is None, "there is no plain DAG run of the second retriever"
    assert "ablation ( f2)" in lacking


def test_context_pressure_and_judges(three_runs):
    base = counted(10, 10, 8, 0)
    hard = counted(10, 10, 5, 0)
    runs = [
        run("none", base, system="dag", frozen="r", judge="one"),
        run("16k", base, system="dag", frozen="r", pressure_tokens=16_000, judge="one"),
        run("32k", hard, system="dag", frozen="r", pressure_tokens=32_000, judge="one"),
    ]
    found = table(runs, "pressure")
    assert [(r["tokens"], value(r["accuracy"])) for r in found] == [
        (0, "80.0"),
        (16_000, "80.0"),
        (32_000, "50.0"),
    ]
    assert value(found[2]["difference"]) == "-30.0"
    other = run("none by two", hard, system="dag", judge="two")
    [agreement] = table([runs[0], other], "judges")
    assert (agreement["answers"], agreement["agree"], agreement["only 1st/2nd"]) == (10, "70.0", "3/0")
    # Cohen: agreement 0.7, by chance 0.8 · 0.5 + 0.2 · 0.5 = 0.5.
    assert agreement["κ"] == "0.400"


# ---------------------------------------------------------------- tokens and money


def test_tokens_and_money(tmp_path):
    item = trajectory("1", searches=0, evidence_policy={"slots": {"keywords": ["a"], "model_calls": 1}})
    item.turns = calls([2, 3])
    for turn, prompt in zip(item.turns, (100, 200), strict=True):
        turn.completion.image_sizes = [(28, 56)] * len(turn.context[0].images)
        turn.completion.prompt_tokens, turn.completion.completion_tokens = prompt, 10
    counted_row = result_row(item, Question(question_id="1", text="?"))
    assert (counted_row.prompt_tokens, counted_row.new_tokens, counted_row.image_tokens) == (300, 20, 10)
    assert counted_row.slot_calls == 1
    slots = counted_row.estimated_tokens
    assert slots["slot_prompt"] > 50
    price = Price(prompt=2.0, completion=8.0, image=1.0)
    expected = ((290 + slots["slot_prompt"]) * 2 + 10 * 1 + (20 + slots["slot_reply"]) * 8) / 1e6
    assert money(counted_row, price) == pytest.approx(expected)
    path = tmp_path / "prices.yaml"
    path.write_text("models:\n  gpt: {prompt: 2.0, completion: 8.0, image: 1.0}\n")
    runs = [run("a", [counted_row], model="gpt"), run("b", [counted_row], model="unknown")]
    found = table(runs, "tokens", prices=read_prices(path))
    assert found[0]["USD for 1000 questions"].value == pytest.approx(1000 * expected)
    assert found[1]["USD for 1000 questions"] is None
    cost = table(runs, "cost")
    assert value(cost[0]["model calls"]) == "3.00", "two of the policy and one for the slots"


def test_uncounted_tokens_are_estimated_and_said():
    item = trajectory("1", searches=0)
    item.turns = calls([2])
    uncounted = result_row(item, Question(question_id="1", text="?"))
    assert (uncounted.prompt_tokens, uncounted.image_tokens) == (None, None)
    assert uncounted.estimated_tokens == {"prompt_text": 0, "images": 2, "reply": 1}
    made, _ = analyse([run("a", [uncounted])], 10, only=["tokens"])
    assert "1 of 1 rows are estimated" in made[0].notes[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: {a: {prompt: -1, completion: 1}}", r"models\.a\.prompt"),
        ("x: [", "not YAML"),
        ("3", "the file"),
    ],
)
def test_a_price_table_that_is_none(tmp_path, text, message):
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_prices(path)


def test_unknown_names_are_refused(three_runs):
    with pytest.raises(ValueError, match="unknown analysis dept; known: coverage"):
        analyse(three_runs, 10, only=["dept"])
    with pytest.raises(ValueError, match="reference run nobody is none of the runs"):
        analyse(three_runs, 10, reference="nobody")


def test_every_analysis_prints_and_none_breaks_on_one_bare_run(three_runs):
    for runs in (three_runs, three_runs[:2], [run("x", [row("1", gold=False, hit=False)])]):
        made, lacking = analyse(runs, 10)
        assert {one.name for one in made} | set(lacking) == {*ANALYSES, "retrievers"}
        for one in made:
            assert one.title in one.render("text")
            assert one.record()["rows"]
