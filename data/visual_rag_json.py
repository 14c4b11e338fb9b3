"""The question file of ViDoSeek and of VRAG's and VISOR's training sets: `{"examples": [{uid, …}]}`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data import rl_parquet
from data.corpus import Corpus
from data.gold import GoldPages, answer_texts, distinct_id, page_list, text_field
from visor.text_files import read_text
from visor.types import Question


def load(path: str | Path, corpus: Corpus | None = None, problems: list[str] | None = None) -> list[Question]:
    """Read the questions of a file; a `.parquet` is read by `data.rl_parquet`, the sets' other form.

    The id is the uid as text; 0 is an id like any other. Where uids are the same, or differ in type only (0
    and "0"), the later one gets `…~2`, and the former case is reported. A numeric answer is kept as written
    in JSON ("12.5"). Gold pages are 1-based; those outside the document are dropped and reported in
    `problems`. An example that cannot be used is left out and reported with its uid and field. Raises
    ValueError for a file of another shape.
    """
    path = Path(path)
    if path.suffix == ".parquet":
        return rl_parquet.load(path, corpus, problems)
    gold = GoldPages(corpus, problems)
    questions: list[Question] = []
    uids: set[tuple[str, str]] = set()
    used: set[str] = set()
    for position, example in enumerate(_read_examples(path), start=1):
        where = f"{path}, example {position}"
        try:
            uid = _uid(example)
            where = f"{where} (uid {uid!r})"
            question = _question(example, str(uid), gold, where)
        except ValueError as error:
            gold.report(f"{where}: {error}; left out", "row")
            continue
        unique = distinct_id(question.question_id, used)
        if (key := (type(uid).__name__, str(uid))) in uids:
            gold.report(f"{where}: the uid is used before; this one is {unique}", "row")
        uids.add(key)
        questions.append(question.model_copy(update={"question_id": unique}))
    return questions


def _read_examples(path: Path) -> list[Any]:
    try:
        # Numbers stay text: 12.50 is an answer, not a quantity.
        content = json.loads(read_text(path), parse_float=str)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from None
    examples = content.get("examples") if isinstance(content, dict) else None
    if not isinstance(examples, list) or not any(isinstance(example, dict) for example in examples or [{}]):
        raise ValueError(f'{path}: expected {{"examples": [...]}} as in ViDoSeek\'s question files')
    return examples


def _uid(example: Any) -> str | int:
    if not isinstance(example, dict):
        raise ValueError(f"{json.dumps(example)} is not an object")
    uid = example.get("uid")
    if uid is None:
        raise ValueError("uid is missing")
    if not isinstance(uid, str | int) or isinstance(uid, bool) or not str(uid).strip():
        raise ValueError(f"uid is {json.dumps(uid)}, neither a text nor a whole number")
    return uid


def _question(example: dict[str, Any], question_id: str, gold: GoldPages, where: str) -> Question:
    """ValueError, naming the field, for an example that is no question."""
    answers = answer_texts(example.get("reference_answer"), "reference_answer")
    text = text_field(example, "query")
    meta = example.get("meta_info")
    if not isinstance(meta, dict):
        raise ValueError("meta_info is missing or no object")
    name = text_field(meta, "file_name", "meta_info.")
    numbers = page_list(meta.get("reference_page"), "meta_info.reference_page")
    if not numbers:
        gold.report(f"{where}: meta_info.reference_page gives no page", "no gold")
    pages = gold.check_all(name, numbers, where)
    sources = meta.get("source_type", [])
    tags: dict[str, Any] = {
        "doc_id": gold.doc_id(name),
        "evidence_sources": [sources] if isinstance(sources, str) else sources or [],
        "query_type": str(meta.get("query_type") or ""),
        "doc_type": str(meta.get("doc_type") or ""),
    }
    if hop := _hop(tags["query_type"], len(pages)):
        tags["hop"] = hop
    return Question(
        question_id=question_id,
        text=text,
        gold_answers=answers,
        gold_page_ids=pages,
        answer_format=str(meta.get("answer_format") or ""),
        tags=tags,
    )


def _hop(query_type: str, gold_pages: int) -> str:
    """Single or multi hop, as the file says, else by the number of gold pages."""
    kind = query_type.lower().replace("_", "-")
    for hop in ("single", "multi"):
        if kind.startswith(f"{hop}-hop"):
            return hop
    return "" if gold_pages == 0 else "single" if gold_pages == 1 else "multi"
