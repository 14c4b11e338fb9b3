"""Question files that this project writes, and what is to be said about the questions of a benchmark."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data.corpus import Corpus
from data.gold import Problem
from data.page_images import shorten
from visor.files import atomic_file
from visor.text_files import read_text
from visor.types import Question, split_page_id
from visor.wording import counted


def write_questions(path: Path, questions: Sequence[Question]) -> None:
    """Replace a file of `questions:` records in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary:
        lines = "".join(question.model_dump_json(exclude_defaults=True) + "\n" for question in questions)
        temporary.write_text(lines, encoding="utf-8")


def check_target(path: Path, benchmark: str) -> None:
    """Raise ValueError when the file holds other questions than an earlier run of this benchmark wrote."""
    if not path.is_file():
        return
    first = next((line for line in read_text(path).split("\n") if line.strip()), "{}")
    try:
        made_by = json.loads(first)["tags"]["benchmark"]
    except (ValueError, KeyError, TypeError):
        made_by = "" if first == "{}" else None
    if made_by not in ("", benchmark):
        owner = f"the questions of {made_by}" if made_by else "questions of your own"
        raise ValueError(f"{path} holds {owner}; name another file with --questions FILE")


def read_summary(questions: Sequence[Question], problems: Sequence[str]) -> str:
    """Counts of what a reader found: `134 questions, 104 with gold pages, 28 unanswerable; …`."""
    gold = sum(bool(question.gold_page_ids) for question in questions)
    unanswerable = sum(question.tags.get("answerable") is False for question in questions)
    kinds = Counter(problem.kind for problem in problems if isinstance(problem, Problem))
    counts = f"{counted(len(questions), 'question')}, {gold} with gold pages, {unanswerable} unanswerable"
    if kinds["row"]:
        counts += f"; {counted(kinds['row'], 'row')} left out or renamed"
    if kinds["gold page"]:
        counts += f"; {counted(kinds['gold page'], 'gold page')} dropped"
    return counts


@dataclass
class QuestionsReport:
    """What was read, and every defect by name."""

    path: Path
    """Where the questions were written."""
    read: int = 0
    with_gold: int = 0
    """Questions with at least one gold page."""
    unanswerable: int = 0
    """Questions that the benchmark says have no answer in their document."""
    missing: dict[str, int] = field(default_factory=dict)
    """Documents that questions are about and that are not there → their number of questions."""
    unusable: dict[str, int] = field(default_factory=dict)
    """The same for documents that failed."""
    unnamed: list[str] = field(default_factory=list)
    """Documents of the corpus that no question is about."""
    equal: list[list[str]] = field(default_factory=list)
    """Ids of questions with the same text, document and answers."""
    problems: list[Problem] = field(default_factory=list)
    """Rows left out, gold pages dropped, and so on; missing documents are in `missing` only."""

    @classmethod
    def of(
        cls, questions: Sequence[Question], problems: Sequence[str], corpus: Corpus, path: Path
    ) -> QuestionsReport:
        """Count and name what is to be said about questions read with a corpus."""
        documents = {record.doc_id: record for record in corpus.documents()}
        named = Counter(doc_id for question in questions for doc_id in documents_of(question))
        equal: dict[tuple, list[str]] = {}
        for question in questions:
            key = (question.text, *documents_of(question), "\0", *question.gold_answers)
            equal.setdefault(key, []).append(question.question_id)
        typed = [p if isinstance(p, Problem) else Problem(p) for p in problems]
        return cls(
            path=path,
            read=len(questions),
            with_gold=sum(bool(question.gold_page_ids) for question in questions),
            unanswerable=sum(question.tags.get("answerable") is False for question in questions),
            missing={name: n for name, n in sorted(named.items()) if name not in documents},
            unusable={
                name: n
                for name, n in sorted(named.items())
                if name in documents and documents[name].status == "failed"
            },
            unnamed=sorted(set(documents) - set(named)),
            equal=[ids for ids in equal.values() if len(ids) > 1],
            problems=[p for p in typed if p.kind != "document" or "is not in the corpus" not in p],
        )

    def lines(self) -> list[str]:
        """The outcome in lines."""
        read = counted(self.read, "question")
        lines = [
            f"{read} read, {self.with_gold} with gold pages, {self.unanswerable} unanswerable → {self.path}"
        ]
        outside = sum(problem.kind == "gold page" for problem in self.problems)
        left_out = sum(problem.kind == "row" for problem in self.problems)
        if outside:
            pages = counted(outside, "gold page is outside its", "gold pages are outside their")
            lines.append(f"note: {pages} document")
        if left_out:
            rows = counted(left_out, "row of questions is", "rows of questions are")
            lines.append(f"note: {rows} left out or renamed")
        lines += [f"questions: {problem}" for problem in self.problems]
        lines += [f"note: equal questions, each kept: {', '.join(ids)}" for ids in self.equal]
        lines += [
            f"note: {counted(count, 'question is', 'questions are')} about {doc_id}, which failed"
            for doc_id, count in self.unusable.items()
        ]
        if self.unnamed:
            documents = counted(len(self.unnamed), "document")
            lines.append(f"note: no question is about {documents}: {shorten(self.unnamed)}")
        return lines


def documents_of(question: Question) -> list[str]:
    """The documents that a question is about: the one its benchmark names, and those of its gold pages."""
    named = question.tags.get("_doc_id") or question.tags.get("doc_id")
    gold = [split_page_id(page_id)[0] for page_id in question.gold_page_ids]
    return list(dict.fromkeys([*([named] if isinstance(named, str) else []), *gold]))
