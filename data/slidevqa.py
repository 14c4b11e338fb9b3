"""SlideVQA: rows of the hub's data set: a question, and the slides of its deck as `page_1` … `page_20`.

The rows may lie as parquet files, as a folder of `datasets.save_to_disk` or as its cache. The JSON lines of
SlideVQA's own repository, which hold no pictures, are read too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.corpus import Corpus
from data.corpus_files import EXTRACTED_FOLDER
from data.gold import GoldPages, answer_text, distinct_id, page_list, text_field
from data.images import PageFile
from data.ingest_report import OnProgress, Progress
from data.mmlongbench import parse_list
from data.page_images import PageImages, shorten
from data.sources import Found, PageGroup, normalise_id
from data.table_rows import RowFile, find_row_files
from visor.types import Question

SLIDES = 20
SLIDE_COLUMNS = [f"page_{number}" for number in range(1, SLIDES + 1)]
QUESTION_COLUMNS = (
    "qa_id deck_name deck_url question answer arithmetic_expression evidence_pages reasoning_type answer_type"
).split()
_MAGIC = ((b"\xff\xd8", ".jpg"), (b"\x89PNG", ".png"), (b"RIFF", ".webp"), (b"GIF8", ".gif"), (b"BM", ".bmp"))


def load(path: str | Path, corpus: Corpus | None = None, problems: list[str] | None = None) -> list[Question]:
    """Read the questions of a file, a folder or a pattern (`DATA/test-*.parquet`).

    The id is `SPLIT:QA_ID`, or the qa_id alone where no file name says a split; where ids repeat, the later
    one gets `…~2` and is reported. The document is the deck's name. `tags["numerical"]` says whether the row
    has an arithmetic expression. Gold pages outside the deck are dropped and reported in `problems`; a row
    that cannot be used is left out and named. Raises ValueError when there are no rows of SlideVQA.
    """
    gold = GoldPages(corpus, problems)
    used: set[str] = set()
    questions: list[Question] = []
    for file in _row_files(path):
        for position, row in file.rows(QUESTION_COLUMNS):
            where = f"{file.path}, row {position + 1}"
            try:
                question = _question(row, file.split, gold, where)
            except ValueError as error:
                gold.report(f"{where}: {error}; left out", "row")
                continue
            unique = distinct_id(question.question_id, used)
            if unique != question.question_id:
                gold.report(f"{where}: id {question.question_id} is used before; this one is {unique}", "row")
            questions.append(question.model_copy(update={"question_id": unique}))
    return questions


def _row_files(path: str | Path) -> list[RowFile]:
    files = []
    for file in find_row_files(path):
        first = next(file.rows(QUESTION_COLUMNS), None)
        if first is not None and {"deck_name", "question", "evidence_pages"} <= first[1].keys():
            files.append(file)
    if not files:
        raise ValueError(f"{path}: no file has rows of SlideVQA (deck_name, question, evidence_pages, …)")
    return files


def _question(row: dict[str, Any], split: str, gold: GoldPages, where: str) -> Question:
    """ValueError, naming the field, for a row that is no question."""
    qa_id, answer = (answer_text(row.get(key), key) for key in ("qa_id", "answer"))
    deck, text = text_field(row, "deck_name"), text_field(row, "question")
    numbers = page_list(parse_list(row.get("evidence_pages") or [], "evidence_pages"), "evidence_pages")
    question_id = f"{split}:{qa_id}" if split else qa_id
    pages = gold.check_all(deck, numbers, f"{where} ({question_id})")
    if not numbers:
        gold.report(f"{where} ({question_id}): no evidence page is given", "no gold")
    expression = str(row.get("arithmetic_expression") or "None")
    tags: dict[str, Any] = {
        "benchmark": "slidevqa",
        "_doc_id": gold.doc_id(deck),
        "numerical": expression != "None",
        "_arithmetic_expression": expression if expression != "None" else "",
    }
    tags |= {name: row[name] for name in ("reasoning_type", "answer_type") if row.get(name)}
    if pages:
        tags["hop"] = "single" if len(pages) == 1 else "multi"
    if split:
        tags["split"] = split
    return Question(
        question_id=question_id,
        text=text,
        gold_answers=[answer],
        gold_page_ids=pages,
        tags=tags,
    )


# ---------------------------------------------------------------- decks


class Decks:
    """The layout of SlideVQA's rows: each deck is a document, its slides are its pages.

    A deck's slides stand in the row of each of its questions; those of the first row are written, byte for
    byte, to a folder below the corpus. A deck that lies there from the same row is not written again.
    """

    def __init__(self, progress: OnProgress | None = None) -> None:
        self.notes: list[str] = []
        self._progress = progress

    def find(self, paths: Sequence[str | Path], skip: Path | None = None) -> list[Found | PageGroup]:
        """Write the slides and list the decks; a `data.sources.Layout` (`skip`: the corpus folder).

        Rows without pictures go with folders of page images among the paths. Raises ValueError where there
        are neither.
        """
        rows_of = self._first_rows(paths)
        if not rows_of:
            return self._find_images(paths, skip)
        root = Path(skip or ".").absolute() / EXTRACTED_FOLDER
        root.mkdir(parents=True, exist_ok=True)
        self._write_missing(rows_of, root)
        documents: list[Found | PageGroup] = []
        for name in [name for names in rows_of.values() for name in names.values()]:
            if pages := _pages_of(root / _folder_name(name)):
                documents.append(PageGroup(normalise_id(name), pages[0].path, pages))
            else:
                self.notes.append(f"{name}: its row holds no slide")
        return documents

    def _write_missing(self, rows_of: dict[RowFile, dict[int, str]], root: Path) -> None:
        """Write the slides of decks that are not there yet, or from another row."""
        markers = {
            (file, position): {"deck_name": name, "row": f"{file.fingerprint}#{position}"}
            for file, names in rows_of.items()
            for position, name in names.items()
        }
        missing = {
            key: marker
            for key, marker in markers.items()
            if _read_marker(root / _folder_name(marker["deck_name"])) != marker
        }
        done = 0
        for file in rows_of:
            positions = {position for other, position in missing if other == file}
            for position, row in file.rows(SLIDE_COLUMNS, positions) if positions else ():
                marker = missing[file, position]
                name, done = marker["deck_name"], done + 1
                _write_deck(root / _folder_name(name), marker, row, file.path.parent)
                if self._progress is not None:
                    slides = (SLIDES * done, SLIDES * len(missing))
                    self._progress(Progress("unpack", done, len(missing), *slides, name))

    def _first_rows(self, paths: Sequence[str | Path]) -> dict[RowFile, dict[int, str]]:
        """For each file with pictures: position of a deck's first row → the deck's name."""
        rows_of: dict[RowFile, dict[int, str]] = {}
        urls: dict[str, Any] = {}
        for path in paths:
            for file in _row_files(path) if has_rows(path) else ():
                if SLIDE_COLUMNS[0] not in file.columns():
                    continue
                for position, row in file.rows(["deck_name", "deck_url"]):
                    name = str(row.get("deck_name") or "")
                    if name and name not in urls:
                        urls[name] = row.get("deck_url")
                        rows_of.setdefault(file, {})[position] = name
                    elif name and urls[name] != row.get("deck_url"):
                        self.notes.append(
                            f"{name}: {file.path}, row {position + 1} gives it another deck_url"
                        )
        return rows_of

    def _find_images(self, paths: Sequence[str | Path], skip: Path | None) -> list[Found | PageGroup]:
        layout = PageImages()
        documents = layout.find([path for path in paths if Path(path).is_dir()], skip)
        self.notes += layout.notes
        if not documents:
            raise ValueError(
                f"no rows with slides (columns page_1 … page_{SLIDES}) and no page images in "
                f"{shorten([str(path) for path in paths])}"
            )
        return documents


def has_rows(path: str | Path) -> bool:
    """Whether there are files of rows at `path` (a folder of page images has none)."""
    try:
        return bool(find_row_files(path))
    except ValueError:
        return False


def _folder_name(deck: str) -> str:
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", deck)[:60].strip("._") or "deck"
    return f"{readable}-{hashlib.sha256(deck.encode()).hexdigest()[:12]}"


def _read_marker(folder: Path) -> dict[str, str] | None:
    try:
        return json.loads((folder / "deck.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write_deck(folder: Path, marker: dict[str, str], row: dict[str, Any], base: Path) -> None:
    """Write a row's slides and then its marker to a folder beside `folder`, and put it in its place."""
    beside = folder.with_name(f".{folder.name}-{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    for number, column in enumerate(SLIDE_COLUMNS, start=1):
        if (content := _image_bytes(row.get(column), base)) is not None:
            suffix = next((s for magic, s in _MAGIC if content.startswith(magic)), ".bin")
            _write(beside / f"page_{number:02d}{suffix}", content)
    _write(beside / "deck.json", json.dumps(marker, ensure_ascii=False).encode())
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _image_bytes(cell: Any, base: Path) -> bytes | None:
    """The bytes of a picture as `datasets` stores it: {bytes, path}; None where there is none."""
    if isinstance(cell, bytes):
        return cell
    if not isinstance(cell, dict):
        return None
    if cell.get("bytes") is not None:
        return cell["bytes"]
    path = base / cell["path"] if cell.get("path") else None
    return path.read_bytes() if path and path.is_file() else None


def _pages_of(folder: Path) -> tuple[PageFile, ...]:
    files = sorted(folder.glob("page_*")) if folder.is_dir() else []
    return tuple(PageFile(int(file.stem.removeprefix("page_")), file) for file in files)
