"""Questions in the parquet form of the field's RL trainers: one row a question, with its ground truth.

    python -m data.rl_parquet vidoseek:rag_dataset.json -o train.parquet --split train

Columns: data_source, prompt [{role, content}], ability, reward_model {style, ground_truth}, extra_info. JSON
lines with the same fields are read too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data.corpus import Corpus
from data.gold import GoldPages, answer_texts, distinct_id, page_list, shown, text_field
from data.table_rows import RowFile, split_of
from visor.files import atomic_file
from visor.types import Question, split_page_id

COLUMNS = ["data_source", "prompt", "ability", "reward_model", "extra_info"]
QUESTION_MARK = "Question:"
"""Stands before the question in a prompt that begins with rules."""
SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        (
            "extra_info",
            pa.struct(
                [
                    ("split", pa.string()),
                    ("index", pa.int64()),
                    ("question_id", pa.string()),
                    ("question", pa.string()),
                    ("gold_answers", pa.list_(pa.string())),
                    ("file_name", pa.string()),
                    ("reference_page", pa.list_(pa.int64())),
                    ("gold_page_ids", pa.list_(pa.string())),
                    ("answer_format", pa.string()),
                    ("tags", pa.string()),
                ]
            ),
        ),
    ]
)
"""As written. `ground_truth` is the first gold answer, since trainers take one text; all of them, pages of
several documents, and the tags as JSON, are in `extra_info`."""


# ---------------------------------------------------------------- reading


def load(path: str | Path, corpus: Corpus | None = None, problems: list[str] | None = None) -> list[Question]:
    """Read the questions of a file.

    The question is `extra_info.question` or `.query`, else the last user message of the prompt, what follows
    the last "Question:" in it. The gold answers are `extra_info.gold_answers`, else the ground truth: a text,
    a number, a list of them, or {target: …}. Gold pages are `extra_info.gold_page_ids`, else `file_name` with
    the 1-based `reference_page`; those outside the document are dropped and reported. The id is
    `extra_info.question_id`, `uid` or `id`, else its split and index, else the row's number; one that repeats
    gets `…~2` and is reported. A row that cannot be used is left out and named with its field. Raises
    ValueError for a file of other columns.
    """
    path = Path(path)
    gold = GoldPages(corpus, problems)
    questions: list[Question] = []
    used: set[str] = set()
    rows = 0
    for position, row in RowFile(path, split_of(path)).rows(COLUMNS):
        rows, where = rows + 1, f"{path}, row {position + 1}"
        try:
            question = _question(row, position, gold, where)
        except ValueError as error:
            gold.report(f"{where}: {error}; left out", "row")
            continue
        unique = distinct_id(question.question_id, used)
        if unique != question.question_id:
            gold.report(f"{where}: id {question.question_id} is used before; this one is {unique}", "row")
        questions.append(question.model_copy(update={"question_id": unique}))
    if rows and not questions and not _has_columns(path):
        raise ValueError(f"{path}: expected the columns {', '.join(COLUMNS)}, as RL trainers use them")
    return questions


def _has_columns(path: Path) -> bool:
    _, first = next(RowFile(path, "").rows(COLUMNS))
    return bool({"reward_model", "prompt"} & first.keys())


def _question(row: dict[str, Any], position: int, gold: GoldPages, where: str) -> Question:
    """ValueError, naming the field, for a row that is no question."""
    extra = row.get("extra_info") if row.get("extra_info") is not None else {}
    if not isinstance(extra, dict):
        raise ValueError(f"extra_info is {shown(extra)}, not an object")
    pages = _gold_pages(extra, gold, where)
    return Question(
        question_id=_question_id(extra, position),
        text=_text(row, extra),
        gold_answers=_answers(row, extra),
        gold_page_ids=pages,
        answer_format=str(extra.get("answer_format") or ""),
        tags=_tags(row, extra, pages, gold),
    )


def _question_id(extra: dict[str, Any], position: int) -> str:
    for key in ("question_id", "uid", "id"):
        value = extra.get(key)
        if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
            return str(value)
    index = extra.get("index")
    number = index if isinstance(index, str | int) and not isinstance(index, bool) else position
    split = extra.get("split")
    return f"{split}:{number}" if isinstance(split, str) and split.strip() else str(number)


def _text(row: dict[str, Any], extra: dict[str, Any]) -> str:
    for key in ("question", "query"):
        if extra.get(key) is not None:
            return text_field(extra, key, "extra_info.")
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        asked = [m.get("content") for m in prompt if isinstance(m, dict) and m.get("role") == "user"]
        prompt = asked[-1] if asked else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError("prompt holds no user message, and extra_info no question")
    question = prompt.rpartition(QUESTION_MARK)[2].strip()
    if not question:
        raise ValueError(f"prompt has nothing after {QUESTION_MARK!r}")
    return question


def _answers(row: dict[str, Any], extra: dict[str, Any]) -> list[str]:
    if extra.get("gold_answers") is not None:
        return answer_texts(extra["gold_answers"], "extra_info.gold_answers")
    reward = row.get("reward_model")
    if not isinstance(reward, dict):
        raise ValueError("reward_model is missing or no object, so there is no ground_truth")
    truth = reward.get("ground_truth")
    if isinstance(truth, dict) and "target" in truth:
        truth = truth["target"]
    return answer_texts(truth, "reward_model.ground_truth")


def _gold_pages(extra: dict[str, Any], gold: GoldPages, where: str) -> list[str]:
    if extra.get("gold_page_ids") is not None:
        given = extra["gold_page_ids"]
        if not isinstance(given, list) or not all(isinstance(page, str) for page in given):
            raise ValueError(f"extra_info.gold_page_ids {shown(given)} is not a list of page ids")
        pages = [page for page_id in given for page in gold.check(*split_page_id(page_id), where)]
        return list(dict.fromkeys(pages))
    numbers = page_list(extra.get("reference_page"), "extra_info.reference_page")
    name = extra.get("file_name")
    if not numbers:
        gold.report(f"{where}: extra_info.reference_page gives no page", "no gold")
        return []
    return gold.check_all(text_field({"file_name": name}, "file_name", "extra_info."), numbers, where)


def _tags(row: dict[str, Any], extra: dict[str, Any], pages: list[str], gold: GoldPages) -> dict[str, Any]:
    """The tags as written by this project, else what the row says of its question."""
    try:
        stored = json.loads(extra["tags"])
    except (KeyError, TypeError, ValueError):
        stored = None
    if isinstance(stored, dict):
        return stored
    named = {"data_source": row.get("data_source"), "split": extra.get("split")}
    named |= {key: extra.get(key) for key in ("query_type", "doc_type")}
    tags: dict[str, Any] = {key: value for key, value in named.items() if isinstance(value, str) and value}
    sources = extra.get("source_type")
    if sources:
        tags["evidence_sources"] = sources if isinstance(sources, list) else [str(sources)]
    name = extra.get("file_name")
    if isinstance(name, str) and name.strip():
        tags["_doc_id"] = gold.doc_id(name)
    if pages:
        tags["hop"] = "single" if len(pages) == 1 else "multi"
    return tags


# ---------------------------------------------------------------- writing


def write_questions_parquet(
    path: str | Path, questions: Sequence[Question], *, split: str = "", data_source: str = "visor"
) -> None:
    """Replace a parquet file by these questions, in order; `load` reads the same questions back.

    `data_source` is for questions without a `benchmark` tag.
    """
    rows = [_row(question, index, split, data_source) for index, question in enumerate(questions)]
    with atomic_file(Path(path)) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), temporary)


def _row(question: Question, index: int, split: str, data_source: str) -> dict[str, Any]:
    pages = [split_page_id(page_id) for page_id in question.gold_page_ids]
    document = pages[0][0] if pages else str(question.tags.get("_doc_id") or "")
    return {
        "data_source": str(question.tags.get("benchmark") or data_source),
        "prompt": [{"role": "user", "content": question.text}],
        "ability": "visual_rag",
        "reward_model": {"style": "model", "ground_truth": next(iter(question.gold_answers), "")},
        "extra_info": {
            "split": split,
            "index": index,
            "question_id": question.question_id,
            "question": question.text,
            "gold_answers": question.gold_answers,
            "file_name": document,
            "reference_page": [number for doc_id, number in pages if doc_id == document],
            "gold_page_ids": question.gold_page_ids,
            "answer_format": question.answer_format,
            "tags": json.dumps(question.tags, ensure_ascii=False),
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    from data.question_files import read_summary
    from data.questions import load_questions

    parser = argparse.ArgumentParser(prog="python -m data.rl_parquet", description="Questions to RL parquet.")
    parser.add_argument("questions", help="READER:PATH, such as vidoseek:rag_dataset.json")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--corpus", help="checks the gold pages, and drops those outside their documents")
    parser.add_argument("--split", default="")
    arguments = parser.parse_args(argv)
    problems: list[str] = []
    try:
        corpus = Corpus.open(arguments.corpus) if arguments.corpus else None
        questions = load_questions(arguments.questions, corpus, problems)
    except ValueError as error:
        print(f"data.rl_parquet: error: {error}", file=sys.stderr)
        return 2
    for problem in problems:
        print(f"questions: {problem}", file=sys.stderr)
    write_questions_parquet(arguments.output, questions, split=arguments.split)
    print(f"{read_summary(questions, problems)} → {arguments.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
