"""What the benchmark readers share: gold pages checked against a corpus, and ids that are distinct."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from data.corpus import Corpus
from data.sources import normalise_id
from visor.types import Question, make_page_id

logger = logging.getLogger(__name__)


ProblemKind = Literal["gold page", "no gold", "document", "row", "note"]


class Problem(str):
    """What is wrong with a question file, in words, and what kind of defect it is.

    gold page: outside its document; no gold: none is given; document: not in the corpus, or not told which;
    row: left out or renamed; note: anything else.
    """

    kind: ProblemKind

    def __new__(cls, text: str, kind: ProblemKind = "note") -> Problem:
        problem = super().__new__(cls, text)
        problem.kind = kind
        return problem


class GoldPages:
    """Turns (document name, page number) of a benchmark into page ids of a corpus.

    Without a corpus only page numbers below 1 can be told to be wrong. Problems go into the given list, or to
    the log when there is none.
    """

    def __init__(self, corpus: Corpus | None, problems: list[str] | None):
        self._problems = problems
        self._counts = corpus.page_counts() if corpus is not None else None
        self._by_stem: dict[str, list[str]] = {}
        for doc_id in self._counts or {}:
            self._by_stem.setdefault(_stem(PurePosixPath(doc_id).name), []).append(doc_id)

    def report(self, problem: str, kind: ProblemKind = "note") -> None:
        """Note a defect that does not stop the reading."""
        problem = Problem(problem, kind)
        if self._problems is None:
            logger.warning(problem)
        else:
            self._problems.append(problem)

    def doc_id(self, name: str) -> str:
        """The corpus's id of a document: the same id, or the only one that ends or begins its path so.

        `x.pdf` finds `folder/x.pdf`, `13/x.pdf` finds `x.pdf`. Where none does, `.pdf` does not count: a
        benchmark names the PDF that a corpus may hold as page images, and the other way round.
        """
        name = normalise_id(name)
        if self._counts is None or name in self._counts:
            return name
        alike = self._by_stem.get(_stem(PurePosixPath(name).name), [])
        for trim in (str, _stem):
            tails = [doc_id for doc_id in alike if _same_tail(trim(doc_id), trim(name))]
            if tails:
                return tails[0] if len(tails) == 1 else name
        return name

    def check(self, name: str, number: int, where: str) -> list[str]:
        """The page id in a list, or [] (reported) when the page is outside its document.

        A document that the corpus lacks is reported too, but keeps its gold pages: the question stays
        answerable in principle, and its retrieval can never be complete.
        """
        doc_id = self.doc_id(name)
        last = None if self._counts is None else self._counts.get(doc_id)
        if number < 1 or (last is not None and number > last):
            allowed = f"1..{last}" if last is not None else "the pages, which start at 1"
            self.report(
                f"{where}: page {number} is outside {allowed} of {doc_id}; dropped from gold", "gold page"
            )
            return []
        if self._counts is not None and last is None:
            self.report(f"{where}: document {doc_id} is not in the corpus", "document")
        return [make_page_id(doc_id, number)]

    def check_all(self, name: str, numbers: Iterable[int], where: str) -> list[str]:
        """Page ids of the valid numbers, each once, in order."""
        pages = [page_id for number in numbers for page_id in self.check(name, number, where)]
        return list(dict.fromkeys(pages))


def _stem(doc_id: str) -> str:
    """A document id without `.pdf`."""
    return doc_id[:-4] if doc_id.lower().endswith(".pdf") else doc_id


def _same_tail(one: str, other: str) -> bool:
    """Whether one path ends as the other."""
    return f"/{one}".endswith(f"/{other}") or f"/{other}".endswith(f"/{one}")


def text_field(record: dict[str, Any], key: str, prefix: str = "") -> str:
    """A field that has to be a text; ValueError naming it, after `prefix`, when it is missing or empty."""
    value = record.get(key)
    if value is None:
        raise ValueError(f"{prefix}{key} is missing")
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{prefix}{key} is {shown(value)}, not a text")
    return value


def answer_texts(value: Any, name: str) -> list[str]:
    """The gold answers that a field holds: a text, a number, or a list of them, as they are written.

    ValueError naming the field for anything else, an empty text and a list with one included: no answer
    could be right by them.
    """
    answers = value if isinstance(value, list) else [value]
    usable = [
        isinstance(item, str | int | float)
        and not isinstance(item, bool)
        and item == item  # not NaN, which tables have for a missing value
        and str(item).strip()
        for item in answers
    ]
    if not answers or not all(usable):
        raise ValueError(f"{name} is {shown(value)}, not an answer")
    return [str(item) for item in answers]


def answer_text(value: Any, name: str) -> str:
    """A field that is one text or number, as `answer_texts` reads them."""
    if isinstance(value, list):
        raise ValueError(f"{name} is {shown(value)}, not a text")
    return answer_texts(value, name)[0]


def page_list(value: Any, name: str) -> list[int]:
    """Page numbers of a field: a list of whole numbers, or one; None is none. ValueError naming the field."""
    pages = [] if value is None else [value] if type(value) is int else value
    if not isinstance(pages, list) or any(type(page) is not int for page in pages):
        raise ValueError(f"{name} {shown(value)} is not a list of page numbers")
    return pages


def shown(value: Any) -> str:
    """A value as messages show it, whatever its type."""
    return json.dumps(value, ensure_ascii=False, default=str)


def distinct_id(wanted: str, used: set[str]) -> str:
    """Return `wanted`, or `wanted~2` and so on when it is among the used ones; adds it to them."""
    unique, number = wanted, 1
    while unique in used:
        number += 1
        unique = f"{wanted}~{number}"
    used.add(unique)
    return unique


def refuse_repeated_ids(questions: list[Question], path: Path) -> None:
    """Raise ValueError naming an id that two questions share: their results would be merged."""
    repeated = [i for i, n in Counter(question.question_id for question in questions).items() if n > 1]
    if repeated:
        raise ValueError(f"{path}: question id {repeated[0]!r} is used more than once; ids must be distinct")
