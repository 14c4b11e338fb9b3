"""Public benchmarks as users have them on disk: documents → corpus, and their questions with page ids.

A format knows where its documents and its question files lie; reading and rendering are those of any
ingest, and the questions come from the reader of the same name (`data.questions`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from data import docbench
from data.corpus import Corpus
from data.gold import Problem
from data.ingest import ingest
from data.ingest_report import IngestReport, OnProgress
from data.page_images import PageImages, shorten
from data.question_files import QuestionsReport, check_target, write_questions
from data.questions import load_questions
from data.render import is_pdf
from data.slidevqa import Decks, has_rows
from data.sources import Found, Layout, PageGroup, find_sources, normalise_id
from visor.types import Question
from visor.wording import counted

QUESTIONS_FILE = "questions.jsonl"
PLAIN = "files"
"""The format of PDFs and images that belong to no benchmark."""
FORMATS = (PLAIN, "page-images", "slidevqa", "vidoseek", "mmlongbench", "docbench")
WANTED = {
    "slidevqa": "parquet files, a folder of `datasets`, or JSON lines",
    "vidoseek": 'a JSON file that begins with "examples"',
    "mmlongbench": "samples.json or a parquet file",
}
"""What holds a benchmark's questions, in words."""


@dataclass
class BenchmarkReport(IngestReport):
    """What preparing a benchmark did."""

    layout_notes: list[str] = field(default_factory=list)
    """What was found odd in the names of its documents."""
    questions: QuestionsReport | None = None

    def summary(self) -> str:
        """The lines of the ingest, then those about the questions."""
        lines = [super().summary(), *(f"note: {note}" for note in self.layout_notes)]
        if self.questions is not None:
            lines += self.questions.lines()
        return "\n".join(lines)


def ingest_as(format_name: str, questions: str | Path | None = None) -> Callable[..., IngestReport]:
    """The function that ingests documents of a format; it takes the arguments of `data.ingest.ingest`.

    `questions` is the file to write the benchmark's questions to; None: CORPUS/questions.jsonl. Raises
    ValueError for an unknown format, and for `questions` with a format that has none.
    """
    if format_name not in FORMATS:
        raise ValueError(f"unknown format {format_name!r}; known: {', '.join(FORMATS)}")
    if questions is not None and format_name in (PLAIN, "page-images"):
        raise ValueError(f"--questions goes with the format of a benchmark, not with {format_name!r}")
    return ingest if format_name == PLAIN else partial(_prepare, format_name, questions)


def _prepare(
    format_name: str,
    questions: str | Path | None,
    paths: Sequence[str | Path],
    out: str | Path,
    **options: Any,
) -> BenchmarkReport:
    for path in paths:
        if not Path(path).exists():
            raise ValueError(f"{path}: no such file or folder")
    files = question_files(format_name, paths)
    for file in files:
        load_questions(f"{format_name}:{file}", problems=[])  # a file of another shape is told now
    target = Path(questions) if questions is not None else Path(out, QUESTIONS_FILE)
    if files:
        check_target(target, format_name)
    layout, notes = make_layout(format_name, options.get("progress"))
    done = ingest(paths, out, layout=layout, **options)
    report = BenchmarkReport(**vars(done), layout_notes=notes)
    if files:
        corpus = Corpus.open(out)
        problems: list[str] = []
        read = _load_all(format_name, files, corpus, problems)
        report.questions = QuestionsReport.of(read, problems, corpus, target)
        for doc_id, count in report.questions.missing.items():
            about = counted(count, "question is", "questions are")
            report.failed.setdefault(doc_id, f"there is no such document; {about} about it")
        write_questions(target, read)
    return report


def make_layout(format_name: str, progress: OnProgress | None = None) -> tuple[Layout, list[str]]:
    """How a format's documents lie, and the list that the layout's notes go into while it searches."""
    if format_name == "slidevqa":
        decks = Decks(progress)
        return decks.find, decks.notes
    if format_name == "page-images":
        images = PageImages()
        return images.find, images.notes
    if format_name == "docbench":
        return docbench.find, []
    notes: list[str] = []
    return partial(_find_pdfs, notes), notes


def question_files(format_name: str, paths: Sequence[str | Path]) -> list[Path]:
    """The question files of a format among or below the paths; [] for page images, which have none.

    Raises ValueError, saying what was looked for, when a benchmark has none.
    """
    if format_name == "page-images":
        return []
    if format_name == "docbench":
        return [Path(path) for path in paths]
    if format_name == "slidevqa":
        files = [Path(path) for path in paths if has_rows(path)]
    else:
        files = [file for path in paths for file in _candidates(Path(path), format_name)]
    if not files:
        given = ", ".join(map(str, paths))
        raise ValueError(f"{given}: found no questions of {format_name} ({WANTED[format_name]}); name it too")
    return list(dict.fromkeys(files))


def _candidates(path: Path, format_name: str) -> list[Path]:
    """Question files at `path`: itself, or those in it and in its immediate subfolders."""
    if path.is_file():
        return [] if is_pdf(path) else [path.absolute()]
    inside = sorted(path.absolute().glob("*")) + sorted(path.absolute().glob("*/*"))
    if format_name == "mmlongbench":
        samples = [file for file in inside if file.name == "samples.json" and file.is_file()]
        return samples or [file for file in inside if file.suffix == ".parquet"]
    return [
        file for file in inside if file.suffix == ".json" and file.is_file() and _begins_with_examples(file)
    ]


def _begins_with_examples(path: Path) -> bool:
    with path.open(encoding="utf-8-sig", errors="replace") as stream:
        return '"examples"' in stream.read(2000)


def _load_all(format_name: str, files: Sequence[Path], corpus: Corpus, problems: list[str]) -> list[Question]:
    """The questions of all files; with several files an id that repeats gets the file's name."""
    questions: list[Question] = []
    for file in files:
        for question in load_questions(f"{format_name}:{file}", corpus, problems):
            tags = {"benchmark": format_name, **question.tags}
            if len(files) > 1:
                tags["question_file"] = file.name
            questions.append(question.model_copy(update={"tags": tags}))
    repeated = {i for i, count in Counter(q.question_id for q in questions).items() if count > 1}
    for position, question in enumerate(questions):
        if question.question_id in repeated:
            unique = f"{question.tags['question_file']}:{question.question_id}"
            questions[position] = question.model_copy(update={"question_id": unique})
    if repeated:
        problems.append(
            Problem(
                f"{counted(len(repeated), 'id is', 'ids are')} used in more than one file; "
                "such ids begin with the file's name",
                "row",
            )
        )
    return questions


def _find_pdfs(
    notes: list[str], paths: Sequence[str | Path], skip: Path | None
) -> Sequence[Found | PageGroup]:
    """The PDFs below the paths, named by their file names; page images where there are no PDFs.

    Where a file name is not the only one of its kind, the path below the named folder is used.
    """
    folders = [path for path in paths if Path(path).is_dir() or is_pdf(Path(path))]
    found = find_sources(folders, skip)
    pdfs = [(name, path) for name, path in found if is_pdf(path)]
    if not pdfs and found:
        images = PageImages(notes)
        return images.find(folders, skip)
    if len(found) > len(pdfs):
        beside = counted(len(found) - len(pdfs), "image beside the PDFs is", "images beside the PDFs are")
        notes.append(f"{beside} left out")
    names = Counter(normalise_id(path.name) for _, path in pdfs)
    if twice := [name for name, count in names.items() if count > 1]:
        names_used = counted(len(twice), "file name is", "file names are")
        notes.append(f"{names_used} used twice, which no question can tell: {shorten(twice)}")
    return [(short if names[short := normalise_id(path.name)] == 1 else name, path) for name, path in pdfs]
