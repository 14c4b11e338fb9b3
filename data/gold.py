"""What the benchmark readers share: gold pages checked against a corpus, and ids that are distinct."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from data.corpus import Corpus
from data.sources import normalise_id
from visor.types import Question, make_page_id

logger = logging.getLogger(__name__)


class GoldPages:
    """Turns (document name, page number) of a benchmark into page ids of a corpus.

    Without a corpus only page numbers below 1 can be told to be wrong. Problems go into the given list, or to
    the log when there is none.
    """

    def __init__(self, corpus: Corpus | None, problems: list[str] | None):
        self._problems = problems
        self._counts = corpus.page_counts() if corpus is not None else None
        names = [PurePosixPath(doc_id).name for doc_id in self._counts or {}]
        once = {name for name, count in Counter(names).items() if count == 1}
        self._by_name = {name: doc_id for name, doc_id in zip(names, self._counts or {}) if name in once}

    def report(self, problem: str) -> None:
        """Note a defect that does not stop the reading."""
        if self._problems is None:
            logger.warning(problem)
        else:
            self._problems.append(problem)

    def doc_id(self, name: str) -> str:
        """The corpus's id of a document: the same id, or the only one with this file name."""
        name = normalise_id(name)
        if self._counts is None or name in self._counts:
            return name
        return self._by_name.get(name, name)

    def check(self, name: str, number: int, where: str) -> list[str]:
        """The page id in a list, or [] (reported) when the page is outside its document.

        A document that the corpus lacks is reported too, but keeps its gold pages: the question stays
        answerable in principle, and its retrieval can never be complete.
        """
        doc_id = self.doc_id(name)
        last = None if self._counts is None else self._counts.get(doc_id)
        if number < 1 or (last is not None and number > last):
            allowed = f"1..{last}" if last is not None else "the pages, which start at 1"
            self.report(f"{where}: page {number} is outside {allowed} of {doc_id}; dropped from gold")
            return []
        if self._counts is not None and last is None:
            self.report(f"{where}: document {doc_id} is not in the corpus")
        return [make_page_id(doc_id, number)]

    def check_all(self, name: str, numbers: Iterable[int], where: str) -> list[str]:
        """Page ids of the valid numbers, each once, in order."""
        pages = [page_id for number in numbers for page_id in self.check(name, number, where)]
        return list(dict.fromkeys(pages))


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
