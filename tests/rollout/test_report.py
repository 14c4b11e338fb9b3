import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rollout.evaluate import EvaluateConfig, evaluate
from rollout.recorder import read_lines, rewrite
from rollout.report import choose, write_report
from rollout.results import ResultRow

EVIL = "</pre><script>alert(1)</script>\"'><img src=x onerror=alert(1)> & \u202e"


class Reader(HTMLParser):
    """Collects tags with attributes, and the text."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.words, self.open, self.bad = [], [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.bad.append(tag)

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture
def run(world, tmp_path, client) -> Path:
    config = EvaluateConfig(
        corpus=str(world.corpus),
        benchmark=world.questions,
        output=str(tmp_path / "run"),
        episode={"prompts": "tiny", "max_turns": 5},
    )
    evaluate(config, client)
    return tmp_path / "run"


def read(path) -> Reader:
    return Reader(path.read_text(encoding="utf-8"))


def test_the_report_is_one_well_formed_page_without_outside_resources(run):
    page = read(write_report(run))
    assert page.bad == []
    assert page.open == []
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe")
        for name in ("src", "href"):
            assert attributes.get(name, "data:").startswith("data:"), (tag, attributes)
    text = " ".join(page.words)
    assert "75.0 %" in text
    assert "colour of apple ?" in text
    assert "4 of 4" in text


def test_pages_crops_and_overlays_are_there(run):
    page = read(write_report(run))
    pictures = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(pictures) == 4 * 3, "per question: the page, the page with the box, the crop"
    boxes = [attributes["style"] for tag, attributes in page.tags if tag == "i"]
    assert len(boxes) == 4
    record = next(read_lines(run / "trajectories.jsonl"))
    crop = next(t["observation"]["crop"] for t in record["turns"] if t["action"]["kind"] == "crop")
    left = 100 * crop[0] / 600
    assert any(f"left:{left:.2f}%" in box for box in boxes), "percent of the 600-pixel page"


def test_text_of_the_run_never_becomes_markup(run):
    records = list(read_lines(run / "trajectories.jsonl"))
    turn = records[0]["turns"][0]
    turn["think"] = turn["query"] = turn["observation"]["message"]["content"][1]["text"] = EVIL
    turn["flags"] = [EVIL]
    records[0]["turns"][-1]["action"]["text"] = EVIL
    rewrite(run / "trajectories.jsonl", records)
    rows = list(read_lines(run / "results.jsonl"))
    for row in rows:
        row |= {
            "answer": EVIL,
            "question": EVIL,
            "gold_answers": [EVIL],
            "error": EVIL,
            "tags": {EVIL: row["question_id"]},
        }
    rewrite(run / "results.jsonl", rows)
    page = read(write_report(run))
    assert page.bad == []
    assert page.open == []
    assert "script" not in {tag for tag, _ in page.tags}
    assert all("onerror" not in attributes for _, attributes in page.tags)
    assert "alert(1)" in " ".join(page.words), "it is shown, as text"


def test_without_the_corpus_the_report_says_so(run, tmp_path):
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["corpus"]["path"] = str(tmp_path / "gone")
    (run / "manifest.json").write_text(json.dumps(manifest))
    page = read(write_report(run, tmp_path / "out.html"))
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert "--corpus" in " ".join(page.words)


def test_a_lone_surrogate_does_not_end_the_report(run):
    rows = (run / "results.jsonl").read_text()
    (run / "results.jsonl").write_text(rows.replace("colour of apple", "colour of \\ud800 apple"))
    assert write_report(run).is_file()


def test_a_training_run_shows_curves_and_the_last_rollouts(run, tmp_path):
    training = tmp_path / "training"
    (training / "rollouts").mkdir(parents=True)
    for step in (2, 10):
        records = list(read_lines(run / "trajectories.jsonl"))
        records[0]["turns"][0]["think"] = f"thought of step {step}"
        rewrite(training / "rollouts" / f"step-{step}.jsonl", records)
    lines = [json.dumps({"step": step, "reward": 0.1 * step}) for step in range(5)]
    (training / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page = read(write_report(training))
    text = " ".join(page.words)
    assert "thought of step 10" in text
    assert "thought of step 2 " not in text
    assert sum(a.get("class") == "curves" for _, a in page.tags) == 1
    with pytest.raises(ValueError, match="no run folder"):
        write_report(tmp_path / "nothing")


def test_choose_takes_each_kind_in_turn():
    def row(question_id, **fields):
        return ResultRow(question_id=question_id, system="s", question="?", **fields)

    rows = [
        row("r1", answer="x", verdict=True),
        row("r2", answer="x", verdict=True),
        row("w1", answer="x", verdict=False),
        row("f1"),
        row("u1", answer="x"),
    ]
    assert [r.question_id for r in choose(rows, 9)] == ["w1", "r1", "f1", "u1", "r2"]
    assert [r.question_id for r in choose(rows, 2)] == ["w1", "r1"]


def test_the_skeleton_has_both_layouts(run):
    html = write_report(run).read_text()
    assert 'name="viewport"' in html
    assert re.search(r"@media \(max-width", html)
