"""MMLongBench-Doc: `samples.json`, one row a question, lists written as Python literals inside strings.

The hub's data set has the same rows in a parquet file, which is read too.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from data.corpus import Corpus
from data.gold import GoldPages, answer_text, distinct_id, page_list, text_field
from data.table_rows import RowFile
from visor.literals import list_literal
from visor.text_files import read_text
from visor.types import Question

NOT_ANSWERABLE = "Not answerable"
COLUMNS = "doc_id doc_type question answer evidence_pages evidence_sources answer_format".split()


def load(path: str | Path, corpus: Corpus | None = None, problems: list[str] | None = None) -> list[Question]:
    """Read the questions of a `samples.json` or of the hub's parquet file.

    Ids are made of document and question, so that they are the same in every version of the benchmark; equal
    rows get `…~2`. `gold_answers` holds the answer as it is written; for the format List its elements are in
    `tags["_answer_list"]`, types kept, and `tags["_doc_id"]` is the document: both stay out of
    the results by tag. Gold pages are 1-based; those outside the document are dropped. Defects are reported
    in `problems` (None: logged), and a row that cannot be read is left out. Raises ValueError for a file of
    another shape.
    """
    path = Path(path)
    gold = GoldPages(corpus, problems)
    used: set[str] = set()
    questions = []
    for number, row in enumerate(_read_rows(path), start=1):
        try:
            questions.append(_question(row, gold, used, f"{path}, row {number}"))
        except ValueError as error:
            gold.report(f"{path}, row {number}: {error}; left out", "row")
    return questions


def _read_rows(path: Path) -> list[Any]:
    if path.suffix == ".parquet":
        return [row for _, row in RowFile(path, "").rows(COLUMNS)]
    try:
        rows = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from None
    if not isinstance(rows, list) or not any(isinstance(row, dict) for row in rows or [{}]):
        raise ValueError(f"{path}: expected a list of rows as in MMLongBench-Doc's samples.json")
    return rows


def _question(row: Any, gold: GoldPages, used: set[str], where: str) -> Question:
    """ValueError, naming the field, for a row that is no question."""
    if not isinstance(row, dict):
        raise ValueError(f"{json.dumps(row)} is not an object")
    doc_id, text = text_field(row, "doc_id"), text_field(row, "question")
    answer = answer_text(row.get("answer"), "answer")
    answer_format = str(row.get("answer_format") or "")
    pages = page_list(parse_list(row.get("evidence_pages") or "[]", "evidence_pages"), "evidence_pages")
    tags: dict[str, Any] = {
        "benchmark": "mmlongbench",
        "_doc_id": gold.doc_id(doc_id),
        "doc_type": str(row.get("doc_type") or ""),
        "evidence_sources": parse_list(row.get("evidence_sources") or "[]", "evidence_sources"),
        "answerable": answer.strip() != NOT_ANSWERABLE,
    }
    if answer_format == "List":
        try:
            tags["_answer_list"] = parse_list(answer, "answer")
        except ValueError as error:
            gold.report(f"{where}: {error}, although answer_format is List; kept as text")
    digest = hashlib.sha256(f"{doc_id}\n{text}".encode()).hexdigest()
    question_id = distinct_id(f"{doc_id}:{digest[:8]}", used)
    where = f"{where} ({question_id})"
    gold_pages = gold.check_all(doc_id, pages, where)
    if gold_pages:
        tags["hop"] = "single" if len(gold_pages) == 1 else "multi"
    elif tags["answerable"] and not pages:
        gold.report(f"{where}: answerable, but no evidence page is given", "no gold")
    return Question(
        question_id=question_id,
        text=text,
        gold_answers=[answer],
        gold_page_ids=gold_pages,
        answer_format=answer_format,
        tags=tags,
    )


def parse_list(text: Any, name: str) -> list[Any]:
    """Read a list that is stored as a string, as a literal: nothing is evaluated as code.

    ValueError naming the field for anything else.
    """
    if isinstance(text, list):
        return text
    value = list_literal(text.strip()) if isinstance(text, str) else None
    if value is None:
        raise ValueError(f"{name} {text!r} is not a list")
    return value
