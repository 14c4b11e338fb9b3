"""A row of a finished run, explained from the run's folder alone."""

from __future__ import annotations

import shutil

import pytest

from rollout.evaluate import EvaluateConfig, evaluate
from rollout.explain import explain
from visor.cli import main
from visor.types import Completion


def reply(request):
    """Look twice with the same words, then answer."""
    word = request.messages[1].text.split()[-2]
    pages = sum(bool(message.images) for message in request.messages)
    if pages < 2:
        return f"<think>find it, not found yet {pages}</think><search>{word} page</search>"
    return f"<think>it says so</think><answer>{word}</answer>"


class Client:
    name = "scripted"

    async def complete(self, request):
        return Completion(text=reply(request), model=self.name, prompt_tokens=321, completion_tokens=9)


@pytest.fixture(scope="module")
def run(world, tmp_path_factory):
    """A run under the layer whose corpus, index and questions are gone by now."""
    folder = tmp_path_factory.mktemp("explain")
    corpus = folder / "corpus"
    shutil.copytree(world.corpus, corpus)
    questions = folder / "questions.jsonl"
    shutil.copy(world.questions.removeprefix("questions:"), questions)
    config = EvaluateConfig(
        corpus=str(corpus),
        benchmark=f"questions:{questions}",
        output=str(folder / "run"),
        taec="on",
        episode={"prompts": "tiny"},
    )
    evaluate(config, Client())
    shutil.rmtree(corpus)
    questions.unlink()
    return folder / "run"


def test_a_row_is_explained_without_corpus_index_or_questions(run):
    text = explain(run, "q1")
    for words in (
        "q1, sample 0, system visor",
        "question:   colour of apple ?",
        "gold:       apple",
        "gold pages: fruit.pdf#page=1",
        "TAEC AM, slots by rules",
        "sent to the retriever: apple page",
        "1. fruit.pdf#page=1",
        "shown GOLD",
        "repeated True",
        "gain (coverage",
        "cost: 321 prompt tokens, 9 reply tokens",
        "answer: apple",
        "judge:      rule: right",
        "reward:     total",
        "retriever: bm25",
        "model: kind given, name scripted",
        "sampling: temperature 0.1",
    ):
        assert words in text, words


def test_the_command_and_rows_that_are_not_there(run, capsys):
    assert main(["explain", str(run), "--question", "q2", "--sample", "0"]) == 0
    assert "colour of banana ?" in capsys.readouterr().out
    assert main(["explain", str(run), "--question", "none"]) == 2
    assert "no trajectory of question 'none'" in capsys.readouterr().err
    assert main(["explain", str(run / "nowhere")]) == 2


def test_the_first_row_is_the_default_and_control_characters_are_escaped(run):
    path = run / "trajectories.jsonl"
    before = path.read_text(encoding="utf-8")
    try:
        path.write_text(before.replace("it says so", "it \\u001b[2J says"), encoding="utf-8")
        assert "\x1b" not in explain(run)
    finally:
        path.write_text(before, encoding="utf-8")
