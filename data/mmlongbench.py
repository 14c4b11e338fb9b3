"""MMLongBench-Doc: `samples.json`, one row a question, lists written as Python literals inside strings.

The hub's data set has the same rows in a parquet file, which is read too.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from data.corpus import Corpus
from data.gold import GoldPages, distinct_id
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
            gold.report(f"{error}; row left out", "row")
    return questions


def _read_rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return [row for _, row in RowFile(path, "").rows(COLUMNS)]
    try:
        rows = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: expected a list of rows as in MMLongBench-Doc's samples.json")
    return rows


def _question(row: dict[str, Any], gold: GoldPages, used: set[str], where: str) -> Question:
    for key in ("doc_id", "question", "answer"):
        if row.get(key) is None:
            raise ValueError(f"{where}: {key} is missing")
    answer, answer_format = str(row["answer"]), str(row.get("answer_format", ""))
    pages = _page_numbers(parse_list(row.get("evidence_pages", "[]"), where), where)
    tags: dict[str, Any] = {
        "benchmark": "mmlongbench",
        "_doc_id": gold.doc_id(row["doc_id"]),
        "doc_type": row.get("doc_type", ""),
        "evidence_sources": parse_list(row.get("evidence_sources", "[]"), where),
        "answerable": answer.strip() != NOT_ANSWERABLE,
    }
    if answer_format == "List":
        try:
            tags["_answer_list"] = parse_list(answer, where)
        except ValueError as error:
            gold.report(f"{error}, although answer_format is List; kept as text")
    digest = hashlib.sha256(f"{row['doc_id']}\n{row['question']}".encode()).hexdigest()
    question_id = distinct_id(f"{row['doc_id']}:{digest[:8]}", used)
    where = f"{where} ({question_id})"
    gold_pages = gold.check_all(row["doc_id"], pages, where)
    if gold_pages:
        tags["hop"] = "single" if len(gold_pages) == 1 else "multi"
    elif tags["answerable"] and not pages:
        gold.report(f"{where}: answerable, but no evidence page is given", "no gold")
    return Question(
        question_id=question_id,
        text=row["question"],
        gold_answers=[answer],
        gold_page_ids=gold_pages,
        answer_format=answer_format,
        tags=tags,
    )


def parse_list(text: Any, where: str) -> list[Any]:
    """Read a list that is stored as a string, as a literal: nothing is evaluated as code."""
    if isinstance(text, list):
        return text
    value = list_literal(text.strip()) if isinstance(text, str) else None
    if value is None:
        raise ValueError(f"{where}: {text!r} is not a list")
    return value


def _page_numbers(pages: list[Any], where: str) -> list[int]:
    for page in pages:
        if type(page) is not int:
            raise ValueError(f"{where}: evidence page {page!r} is not a whole number")
    return pages
