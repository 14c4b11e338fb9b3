"""A small real corpus (a PDF of four pages with index and questions) and a client that plays a policy."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from data.corpus import ingest
from visor.retrieval.index import build_index, default_index_path
from visor.types import Completion, Question

WORDS = {1: "apple", 2: "banana", 3: "cherry", 4: "damson"}


@dataclass
class World:
    corpus: Path
    questions: str
    """As `questions:PATH`."""


@dataclass
class FunctionClient:
    """A policy client whose reply is a function of the request; keeps the first user text of each request."""

    reply: Callable
    name: str = "scripted"
    asked: list[str] = field(default_factory=list)

    async def complete(self, request):
        self.asked.append(request.messages[1].text)
        text = self.reply(request)
        return Completion(text=text, model=self.name)


def search_then_answer(request):
    """Search the fruit of the question 'colour of X ?', crop the page, answer with the fruit's name."""
    word = request.messages[1].text.split()[-2]
    turn = sum(bool(message.images) for message in request.messages)
    if turn == 0:
        return f"<think>find {word}</think><search>{word}</search>"
    if turn == 1:
        return f"<think>the page names {word}</think><bbox>[100, 100, 600, 500]</bbox>"
    return f"<think>it says so</think><answer>{word}</answer>"


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> World:
    from reportlab.pdfgen.canvas import Canvas

    folder = tmp_path_factory.mktemp("world")
    canvas = Canvas(str(folder / "fruit.pdf"), pagesize=(300, 200))
    for number, word in WORDS.items():
        canvas.setFillColorRGB(0.2 * number, 0.1, 0.3)
        canvas.rect(20, 20, 120, 90, fill=1)
        canvas.drawString(20, 150, f"{word} page")
        canvas.showPage()
    canvas.save()
    assert ingest([folder / "fruit.pdf"], folder / "corpus", workers=1).ok
    from data.corpus import Corpus

    corpus = Corpus.open(folder / "corpus")
    build_index(corpus, default_index_path(folder / "corpus"))
    pages = corpus.pages()
    questions = [
        Question(
            question_id=f"q{number}",
            text=f"colour of {word} ?",
            gold_answers=[word if number != 4 else "other"],
            gold_page_ids=[pages[number - 1].page_id],
            tags={"hop": "single" if number < 3 else "multi"},
        )
        for number, word in WORDS.items()
    ]
    lines = "".join(question.model_dump_json() + "\n" for question in questions)
    (folder / "questions.jsonl").write_text(lines, encoding="utf-8")
    return World(folder / "corpus", f"questions:{folder / 'questions.jsonl'}")


@pytest.fixture
def client() -> FunctionClient:
    return FunctionClient(search_then_answer)
