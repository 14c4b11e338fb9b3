"""Every stage on real PDFs and real questions: ingest, index, search, GRPO, evaluation, replay.

The policy is a random tiny one, or a script, so nothing is learned; what is checked is that every stage runs
and that every record is right.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from data.corpus import Corpus
from data.questions import load_questions
from data.slide_lessons import vocabulary_texts
from visor.models.tiny import build_tiny_policy
from visor.types import Trajectory, split_page_id

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT.parent / "shared" / "data" / "mmlongbench"
QUESTIONS = f"mmlongbench:{SAMPLE / 'samples.json'}"
SMALL_PAGES = [
    f"--episode.{name}={pixels}"
    for name, pixels in (
        ("page_min_pixels", 50176),
        ("page_max_pixels", 100352),
        ("crop_min_pixels", 50176),
        ("crop_max_pixels", 100352),
    )
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SAMPLE.is_dir(), reason="the sample of MMLongBench-Doc is not beside the project"),
]


def run(*command: object) -> str:
    """Run a command of the project as a user would; its standard output."""
    words = [str(word) for word in command]
    words[0:1] = (
        [str(Path(sys.executable).parent / "visor")]
        if words[0] == "visor"
        else [sys.executable, "-m", words[0]]
    )
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def evaluate(*arguments: object) -> str:
    return run("rollout.evaluate", *arguments)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    out = tmp_path_factory.mktemp("real") / "corpus"
    assert "329 pages" in run("visor", "ingest", SAMPLE / "documents", "-o", out)
    assert "329 pages" in run("visor", "index", out, "--retriever", "bm25")
    return out


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    path = tmp_path_factory.mktemp("real") / "policy"
    build_tiny_policy(path, vocabulary_texts(repeats=50))
    return path


def test_search_finds_the_page_of_a_real_question(corpus):
    hits = run(
        "visor", "search", corpus, "press and hold the down button wake up the voice assistant", "-k", 3
    )
    assert "watch_d.pdf#page=3" in hits


def test_scripted_evaluation_reads_zooms_and_answers_and_replays(corpus, tmp_path):
    questions = [q for q in load_questions(QUESTIONS, Corpus.open(corpus)) if q.gold_page_ids][:20]
    script = tmp_path / "script.jsonl"
    with script.open("w") as file:
        for question in questions:
            replies = [
                f"<think>I need pages.</think><search>{question.text}</search>",
                "<think>The page has a table that is hard to read.</think><bbox>[100,100,600,500]</bbox>",
                f"<think>I have it and want to verify it.</think><search>{question.text}</search>",
                f"<think>It is confirmed.</think><answer>{question.gold_answers[0]}</answer>",
            ]
            file.write(json.dumps({"question": question.text, "replies": replies}) + "\n")
    (tmp_path / "questions.jsonl").write_text("".join(q.model_dump_json() + "\n" for q in questions))
    for taec in ("off", "on"):
        output = tmp_path / taec
        evaluate(
            "--model", f"script:{script}", "--benchmark", f"questions:{tmp_path}/questions.jsonl",
            "--corpus", corpus, "--taec", taec, "--output", output,
        )  # fmt: skip
        metrics = json.loads((output / "metrics.json").read_text())
        assert metrics["n"] == 20
        assert metrics["faults"] == metrics["unscored"] == 0
        assert metrics["finish_rate"] == 1.0
        assert metrics["max_context_images"] <= 2
        pages = Corpus.open(corpus)
        for line in (output / "trajectories.jsonl").read_text().splitlines():
            trajectory = Trajectory.model_validate_json(line)
            assert [turn.action.kind for turn in trajectory.turns] == ["search", "crop", "search", "answer"]
            page, x = trajectory.shown_page_ids[0], trajectory.turns[1].observation.crop
            record = pages.page(page)
            assert (record.doc_id, record.page_number) == split_page_id(page)
            assert 0 <= x[0] < x[2] <= record.width
            assert 0 <= x[1] < x[3] <= record.height
            assert trajectory.turns[2].is_verification
        run("visor", "replay", output)


def test_grpo_and_evaluation_run_on_real_pages(corpus, policy, tmp_path):
    run(
        "grpo.train", "--config", "configs/grpo/smoke.yaml", "--model_name_or_path", policy,
        "--corpus", corpus, "--output_dir", tmp_path / "grpo", "--episode.prompts", "visor",
        "--questions", QUESTIONS, "--max_steps", 1,
    )  # fmt: skip
    rollouts = (tmp_path / "grpo" / "rollouts" / "step-1.jsonl").read_text().splitlines()
    trajectories = [Trajectory.model_validate_json(line) for line in rollouts]
    assert len(trajectories) == 10
    for trajectory in trajectories:
        assert trajectory.error is None
        assert trajectory.reward.total is not None
        assert all(turn.completion.token_ids for turn in trajectory.turns)
        assert all(
            len(turn.completion.logprobs) == len(turn.completion.token_ids) for turn in trajectory.turns
        )
    output = tmp_path / "evaluation"
    evaluate(
        "--checkpoint", tmp_path / "grpo", "--corpus", corpus, "--benchmark", QUESTIONS, "--limit", 6,
        "--max_new_tokens", 32, "--output", output, *SMALL_PAGES,
    )  # fmt: skip
    metrics = json.loads((output / "metrics.json").read_text())
    assert metrics["n"] == 6
    assert metrics["faults"] == 0
