"""A folder of page images, as benchmarks ship them: which images are one document, and which page each is.

    report_1.png … report_12.png       documents side by side: the name up to its number is the document
    report/1.png … report/12.png       a folder a document: the folder is the document

The page is the number at the end of the name, with or without leading zeros and a word such as `page`.
SlideShare's names end in a picture width (`slide-3-1024.jpg`), which is not the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from data.corpus_files import legible
from data.images import IMAGE_SUFFIXES, PageFile
from data.sources import Found, PageGroup, find_sources, normalise_id
from visor.wording import counted

MAX_PAGE_NUMBER = 99_999
"""A larger number at the end of a name is a date or a code, not a page."""
_WORD = r"(?:page|pg|p|slide|img|image)"
_NUMBERED = re.compile(rf"(?:(?P<stem>.*?)[\s_.-]+)?{_WORD}?[\s_.-]*(?P<number>\d+)", re.IGNORECASE)
_SLIDESHARE = re.compile(r"(?P<stem>.*?)-?(?P<number>\d+)-(?:320|638|728|1024|2048)")


@dataclass(frozen=True)
class _Image:
    name: str
    """Path below the folder that the user named."""
    path: Path
    label: str
    """The file's name without its number: images of one document have the same."""
    stem: str
    """The document's part of the name; "" when the name is a number (and a word such as `page`)."""
    number: int | None
    """None: the name has no page number."""

    @property
    def folder(self) -> str:
        folder = PurePosixPath(self.name).parent.as_posix()
        return "" if folder == "." else folder


@dataclass
class PageImages:
    """The layout of a page-image folder. `notes` collects what a user should know of its names."""

    notes: list[str] = field(default_factory=list)

    def find(self, paths: Sequence[str | Path], skip: Path | None = None) -> list[Found | PageGroup]:
        """Group the images below `paths` into documents; a `data.sources.Layout`.

        A folder below a named one whose numbered images share one label is a document of the folder's name;
        elsewhere each label is a document, named by the folder and its stem. An image without a number is a
        document of its own, named by the file. Other files are left out and noted. Raises what
        `find_sources` does.
        """
        found = find_sources(paths, skip)
        others = [name for name, path in found if path.suffix.lower() not in IMAGE_SUFFIXES]
        if others:
            files = counted(len(others), "file is no page image", "files are no page images")
            self.notes.append(f"{files} and left out: {shorten(others)}")
        by_folder: dict[tuple[Path, str], list[_Image]] = {}
        for name, path in found:
            if path.suffix.lower() in IMAGE_SUFFIXES:
                image = _read_name(name, path)
                by_folder.setdefault((path.parent, image.folder), []).append(image)
        documents: list[Found | PageGroup] = []
        for images in by_folder.values():
            documents += self._documents_of(images)
        return documents

    def _documents_of(self, images: list[_Image]) -> list[Found | PageGroup]:
        """The documents of one folder."""
        labels: dict[str, list[_Image]] = {}
        documents: list[Found | PageGroup] = []
        for image in images:
            if image.number is None:
                documents.append((image.name, image.path))
            else:
                labels.setdefault(image.label, []).append(image)
        for members in labels.values():
            folder, stem = members[0].folder, members[0].stem
            if folder and len(labels) == 1:
                name = folder
            elif stem:
                name = f"{folder}/{stem}" if folder else stem
            else:
                name = folder or normalise_id(members[0].path.parent.name)
            documents.append(self._group(name, members))
        return documents

    def _group(self, name: str, members: Iterable[_Image]) -> PageGroup:
        by_number: dict[int, Path] = {}
        for image in sorted(members, key=lambda image: (image.number or 0, image.path.name)):
            number = image.number or 0
            if number in by_number:
                kept, other = legible(by_number[number].name), legible(image.path.name)
                self.notes.append(
                    f"{name}: {kept} and {other} are both page {number}; the second is left out"
                )
            else:
                by_number[number] = image.path
        shift = 1 if 0 in by_number else 0
        if shift:
            self.notes.append(f"{name}: its names count from 0; page numbers are one higher")
        pages = tuple(PageFile(number + shift, by_number[number]) for number in sorted(by_number))
        return PageGroup(name, pages[0].path, pages)


def shorten(names: Sequence[str], most: int = 5) -> str:
    """The first names, and whether there are more."""
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def _read_name(name: str, path: Path) -> _Image:
    stem = PurePosixPath(name).stem
    match = _SLIDESHARE.fullmatch(stem) or _NUMBERED.fullmatch(stem)
    if match is None or int(match["number"]) > MAX_PAGE_NUMBER:
        return _Image(name, path, stem, stem, None)
    start, end = match.span("number")
    document = match["stem"] or ""
    if re.fullmatch(_WORD, document, re.IGNORECASE):
        document = ""
    return _Image(name, path, stem[:start] + "#" + stem[end:], document, int(match["number"]))
