"""The question file of ViDoSeek and of VRAG's and VISOR's training sets: `{"examples": [{uid, …}]}`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data.corpus import Corpus
from data.gold import GoldPages, distinct_id
from visor.text_files import read_text
from visor.types import Question


def load(path: str | Path, corpus: Corpus | None = None, problems: list[str] | None = None) -> list[Question]:
    """Read the questions of a file.

    The id is the uid as text; 0 is an id like any other, and where uids differ only in type (0 and "0") the
    later one gets `…~2`. A numeric answer is kept as written in JSON ("12.5"). Gold pages are 1-based; those
    outside the document are dropped and reported in `problems`. An example without a usable answer, query or
    document is left out and reported, naming its uid. Raises ValueError for a file of another shape and for
    two examples with the same uid.
    """
    path = Path(path)
    gold = GoldPages(corpus, problems)
    questions: list[Question] = []
    uids: set[tuple[str, str]] = set()
    used: set[str] = set()
    for position, example in enumerate(_read_examples(path), start=1):
        uid = example.get("uid")
        if uid is None:
            gold.report(f"{path}, example {position}: uid is missing; left out", "row")
            continue
        if (key := (type(uid).__name__, str(uid))) in uids:
            raise ValueError(f"{path}, example {position}: uid {uid!r} is used more than once")
        uids.add(key)
        where = f"{path}, uid {uid!r}"
        if defect := _defect(example):
            gold.report(f"{where}: {defect}; left out", "row")
            continue
        question_id = distinct_id(str(uid), used)
        questions.append(_question(example, question_id, gold, where))
    return questions


def _read_examples(path: Path) -> list[dict[str, Any]]:
    try:
        # Numbers stay text: 12.50 is an answer, not a quantity.
        content = json.loads(read_text(path), parse_float=str)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from None
    examples = content.get("examples") if isinstance(content, dict) else None
    if not isinstance(examples, list) or not all(isinstance(example, dict) for example in examples):
        raise ValueError(f'{path}: expected {{"examples": [...]}} as in ViDoSeek\'s question files')
    return examples


def _defect(example: dict[str, Any]) -> str:
    """Why an example cannot be used; "" when it can."""
    answer = example.get("reference_answer")
    if not isinstance(answer, str | int | list) or isinstance(answer, bool):
        return f"reference_answer is {json.dumps(answer)}, not an answer"
    if not isinstance(example.get("query"), str) or not example["query"].strip():
        return "query is missing or empty"
    meta = example.get("meta_info")
    if not isinstance(meta, dict) or not isinstance(meta.get("file_name"), str):
        return "meta_info.file_name is missing"
    pages = meta.get("reference_page", [])
    if not isinstance(pages, list) or any(type(page) is not int for page in pages):
        return f"reference_page {json.dumps(pages)} is not a list of page numbers"
    return ""


def _question(example: dict[str, Any], question_id: str, gold: GoldPages, where: str) -> Question:
    meta, answer = example["meta_info"], example["reference_answer"]
    pages = gold.check_all(meta["file_name"], meta.get("reference_page", []), where)
    sources = meta.get("source_type", [])
    tags = {
        "doc_id": gold.doc_id(meta["file_name"]),
        "evidence_sources": [sources] if isinstance(sources, str) else sources,
        "query_type": meta.get("query_type", ""),
        "doc_type": meta.get("doc_type", ""),
    }
    if hop := _hop(tags["query_type"], len(pages)):
        tags["hop"] = hop
    return Question(
        question_id=question_id,
        text=example["query"],
        gold_answers=[str(item) for item in answer] if isinstance(answer, list) else [str(answer)],
        gold_page_ids=pages,
        answer_format=meta.get("answer_format", ""),
        tags=tags,
    )


def _hop(query_type: str, gold_pages: int) -> str:
    """Single or multi hop, as the file says, else by the number of gold pages."""
    kind = query_type.lower().replace("_", "-")
    for hop in ("single", "multi"):
        if kind.startswith(f"{hop}-hop"):
            return hop
    return "" if gold_pages == 0 else "single" if gold_pages == 1 else "multi"
