"""DocBench: numbered folders, each with one PDF and its questions in `<number>_qa.jsonl`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data.corpus import Corpus
from data.gold import GoldPages, answer_texts, distinct_id, text_field
from data.render import is_pdf
from data.sources import Found, normalise_id
from visor.text_files import read_text
from visor.types import Question

DOMAINS = (
    (48, "academic"),
    (88, "finance"),
    (132, "government"),
    (178, "law"),
    (228, "news"),
)
"""(last folder number, domain of the folders up to it), as the benchmark numbers them."""


def load(path: str | Path, corpus: Corpus | None = None, problems: list[str] | None = None) -> list[Question]:
    """Read the questions of DocBench's data folder, of one numbered folder, or of one `…_qa.jsonl`.

    Ids are made of folder and question. The benchmark names no evidence pages, so there are no gold pages:
    answers can be judged, retrieval cannot. `tags["answerable"]` is false for the types that begin with
    `una`. A line that is no question is left out and named in `problems`. Raises ValueError when there is no
    such folder.
    """
    gold = GoldPages(corpus, problems)
    used: set[str] = set()
    questions = []
    for folder in numbered_folders(path):
        doc_id = _document(folder, gold)
        for where, row in _rows(folder / f"{folder.name}_qa.jsonl", gold):
            try:
                questions.append(_question(row, folder, doc_id, used))
            except ValueError as error:
                gold.report(f"{where}: {error}; left out", "row")
    return questions


def find(paths: Sequence[str | Path], skip: Path | None = None) -> list[Found]:
    """The PDFs of the numbered folders, named FOLDER/FILE; a `data.sources.Layout`."""
    found = []
    for path in paths:
        for folder in numbered_folders(path):
            found += [(_name(pdf), pdf.absolute()) for pdf in _pdfs(folder)]
    return list(dict.fromkeys(found))


def numbered_folders(path: str | Path) -> list[Path]:
    """The folders with a `<number>_qa.jsonl`, by number: those in `path`, or `path` itself."""
    path = Path(path)
    if path.name == f"{path.absolute().parent.name}_qa.jsonl":
        path = path.absolute().parent
    if _is_numbered(path.absolute()):
        return [path.absolute()]
    inside = [folder for folder in path.iterdir() if _is_numbered(folder)] if path.is_dir() else []
    if not inside:
        raise ValueError(f"{path}: there are no numbered folders with <number>_qa.jsonl, as DocBench has")
    return sorted(inside, key=lambda folder: int(folder.name))


def _is_numbered(folder: Path) -> bool:
    name = folder.name
    return name.isascii() and name.isdigit() and (folder / f"{name}_qa.jsonl").is_file()


def _pdfs(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if is_pdf(file) and not file.name.startswith("."))


def _name(pdf: Path) -> str:
    return normalise_id(f"{pdf.parent.name}/{pdf.name}")


def _document(folder: Path, gold: GoldPages) -> str:
    """The id of the folder's document, or the folder's name where it is not the only one."""
    pdfs = _pdfs(folder)
    if len(pdfs) == 1:
        return gold.doc_id(_name(pdfs[0]))
    if pdfs:
        names = ", ".join(pdf.name for pdf in pdfs)
        gold.report(f"{folder}: which of its PDFs the questions are about is not said: {names}", "document")
    return folder.name


def _rows(path: Path, gold: GoldPages) -> Iterator[tuple[str, Any]]:
    """(where it stands, record) of each line; one that is not JSON is reported."""
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            # Numbers stay text: 12.50 is an answer, not a quantity.
            yield where, json.loads(line, parse_float=str)
        except json.JSONDecodeError as error:
            gold.report(f"{where}: not JSON: {error.msg}; left out", "row")


def _question(row: Any, folder: Path, doc_id: str, used: set[str]) -> Question:
    """ValueError, naming the field, for a row that is no question."""
    if not isinstance(row, dict):
        raise ValueError("not an object")
    text, answers = text_field(row, "question"), answer_texts(row.get("answer"), "answer")
    kind = str(row.get("type") or "")
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Question(
        question_id=distinct_id(f"{folder.name}:{digest[:8]}", used),
        text=text,
        gold_answers=answers,
        tags={
            "benchmark": "docbench",
            "_doc_id": doc_id,
            "question_type": kind,
            "domain": next((domain for last, domain in DOMAINS if int(folder.name) <= last), ""),
            "answerable": not kind.startswith("una"),
            "_evidence": str(row.get("evidence") or ""),
        },
    )
