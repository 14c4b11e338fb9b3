"""`captions.jsonl` of a corpus: one line a captioned page, appended and synced; and its merge into the pages.

A caption belongs to the bytes of a page image: a page whose image changes has none until it is asked for
again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from pydantic import ValidationError

from data.corpus_files import CaptionsState, read_corpus, write_corpus
from data.corpus_writer import only_one
from visor.files import atomic_file, file_sha256
from visor.types import Page, Record

CAPTIONS_FILE = "captions.jsonl"


class CaptionRecipe(Record):
    """What decides a caption beside the page; a corpus's captions are all of one recipe."""

    model: str
    prompt_sha256: str
    max_pixels: int
    max_tokens: int


class CaptionLine(CaptionRecipe):
    """A line of the file."""

    page_id: str
    image_sha256: str
    caption: str
    cut: bool = False
    """The reply ended at `max_tokens`."""

    @property
    def recipe(self) -> CaptionRecipe:
        return CaptionRecipe(**{name: getattr(self, name) for name in CaptionRecipe.model_fields})


@dataclass(frozen=True)
class _Complete:
    lines: list[CaptionLine]
    end: int
    """Bytes up to and with the last complete line."""


class CaptionFile:
    """The captions of a corpus, open for adding; only one process may hold it."""

    def __init__(self, folder: Path) -> None:
        """Read what is there; a torn last line is cut off. Raises ValueError for a damaged line before it,
        and when another process has the file open."""
        self.path = folder / CAPTIONS_FILE
        self._stream = _open(self.path)
        try:
            complete = _read(self.path)
            self._stream.truncate(complete.end)
        except BaseException:
            self._stream.close()
            raise
        self.lines = complete.lines

    def usable(self, pages: Sequence[Page], recipe: CaptionRecipe) -> dict[str, CaptionLine]:
        """Page id → its caption, for pages whose image is the captioned one, of this recipe."""
        images = {page.page_id: page.sha256 for page in pages}
        return {
            line.page_id: line
            for line in self.lines
            if line.recipe == recipe and images.get(line.page_id) == line.image_sha256
        }

    def other_recipe(self, recipe: CaptionRecipe) -> CaptionRecipe | None:
        """A recipe among the lines that is not the given one."""
        return next((line.recipe for line in self.lines if line.recipe != recipe), None)

    def keep_only(self, recipe: CaptionRecipe) -> None:
        """Remove the lines of other recipes, in one step."""
        if self.other_recipe(recipe) is None:
            return
        self.lines = [line for line in self.lines if line.recipe == recipe]
        with atomic_file(self.path) as temporary:
            temporary.write_bytes(b"".join(map(_encode, self.lines)))
        old, self._stream = self._stream, _open(self.path)
        old.close()

    def append(self, line: CaptionLine) -> None:
        """Add a line and wait until it is on the disk."""
        self._stream.write(_encode(line))
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self.lines.append(line)

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(path: Path) -> BinaryIO:
    """Open for adding, for this process alone."""
    stream = open(path, "ab")  # noqa: SIM115 - the caller closes it
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        raise ValueError(f"another process is captioning {path.parent}; wait for it to end") from None
    return stream


def _encode(line: CaptionLine) -> bytes:
    return line.model_dump_json().encode() + b"\n"


def _read(path: Path) -> _Complete:
    lines: list[CaptionLine] = []
    end = 0
    content = path.read_bytes()
    for number, raw in enumerate(content.split(b"\n")[:-1], start=1):
        if raw.strip():
            try:
                lines.append(CaptionLine.model_validate(json.loads(raw)))
            except (ValidationError, ValueError):
                raise ValueError(f"{path}, line {number}: no caption; repair or remove the line") from None
        end += len(raw) + 1
    return _Complete(lines, end)


def merge(folder: Path, file: CaptionFile, recipe: CaptionRecipe) -> CaptionsState:
    """Put the captions of a recipe into the pages, in one step, and say so in the corpus.

    The pages are read again under the corpus's lock, so that an ingest of the meantime is kept. Raises
    ValueError while an ingest works on the corpus.
    """
    with only_one(folder):
        documents, pages = read_corpus(folder)
        captions = {page_id: line.caption for page_id, line in file.usable([*pages.values()], recipe).items()}
        pages = {
            page_id: page.model_copy(update={"caption": captions.get(page_id, "")})
            for page_id, page in pages.items()
        }
        state = CaptionsState(
            source="model",
            count=len(captions),
            sha256=file_sha256(file.path),
            model=recipe.model,
            prompt_sha256=recipe.prompt_sha256,
            max_pixels=recipe.max_pixels,
        )
        write_corpus(folder, documents, pages, state)
    return state if captions else CaptionsState()
