"""Question files: our own JSON lines, and one name for every benchmark reader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from data import docbench, mmlongbench, rl_parquet, slidevqa, visual_rag_json
from data.corpus import Corpus
from data.gold import GoldPages, refuse_repeated_ids
from visor.text_files import read_text
from visor.types import Question, split_page_id

Loader = Callable[..., list[Question]]


def load(path: str | Path, corpus: Corpus | None = None, problems: list[str] | None = None) -> list[Question]:
    """Read JSON lines of `Question` records; a byte order mark, CRLF and blank lines are tolerated.

    For hand-written files, `id`, `question` and `answer` may stand for `question_id`, `text` and
    `gold_answers`.
    With a corpus, gold pages outside their document are dropped and reported in `problems`. Raises
    ValueError naming file and line for a line that is no question or repeats an id.
    """
    path = Path(path)
    gold = GoldPages(corpus, problems)
    questions = []
    # Split at line feeds only: str.splitlines would also cut at U+2028 inside a value.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        question = _parse(line, where)
        question.gold_page_ids = [
            page_id
            for given in question.gold_page_ids
            for page_id in gold.check(*_split(given, where), f"{where} ({question.question_id})")
        ]
        questions.append(question)
    refuse_repeated_ids(questions, path)
    return questions


LOADERS: dict[str, Loader] = {
    "questions": load,
    "mmlongbench": mmlongbench.load,
    "vidoseek": visual_rag_json.load,
    "visual_rag_json": visual_rag_json.load,
    "rl_parquet": rl_parquet.load,
    "slidevqa": slidevqa.load,
    "docbench": docbench.load,
}
"""Benchmark name → `load(path, corpus=None, problems=None) -> list[Question]`."""
READ_FOLDERS = frozenset({"slidevqa", "docbench"})
"""Readers whose PATH may be a folder, and for SlideVQA a pattern."""


def load_questions(
    spec: str, corpus: Corpus | None = None, problems: list[str] | None = None
) -> list[Question]:
    """Read the questions of "name:PATH", for example `mmlongbench:samples.json` or `questions:mine.jsonl`.

    Defects that do not stop the reading are appended to `problems`. Raises ValueError for an unknown name
    and a file that cannot be read.
    """
    name, separator, path = spec.partition(":")
    if not separator or name not in LOADERS:
        raise ValueError(
            f"{spec!r} names no questions; expected NAME:PATH with NAME one of {', '.join(LOADERS)}"
        )
    if name not in READ_FOLDERS and not Path(path).is_file():
        raise ValueError(f"{spec!r}: there is no file {path}")
    return LOADERS[name](path, corpus=corpus, problems=problems)


def _parse(line: str, where: str) -> Question:
    try:
        return Question.model_validate(_long_form(json.loads(line)))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: not a question record: {field}: {first['msg']}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error.msg}") from None


def _long_form(record: Any) -> Any:
    """Turn the hand-written keys into those of `Question`; anything else is left to its validation."""
    if not isinstance(record, dict) or "question_id" in record:
        return record
    names = {"id": "question_id", "question": "text", "answer": "gold_answers"}
    record = {names.get(key, key): value for key, value in record.items()}
    for key in ("question_id", "gold_answers"):
        if isinstance(record.get(key), int | float):
            record[key] = str(record[key])
    if isinstance(record.get("gold_answers"), str):
        record["gold_answers"] = [record["gold_answers"]]
    return record


def _split(page_id: str, where: str) -> tuple[str, int]:
    try:
        return split_page_id(page_id)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
