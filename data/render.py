"""One document file → page images on disk and page texts. Runs in a worker process."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

from PIL import Image

from data.images import (
    ImageError,
    PageFile,
    count_frames,
    is_plain,
    load_page_image,
    pad_to_usable,
    shrink_to,
)
from data.pdf import PDF_SUFFIX, RENDERER, DocumentError, count_pages, open_pdf, read_page

DEFAULT_DPI = 144
DEFAULT_MAX_PIXELS = 12_845_056
"""The largest image that Qwen2.5-VL takes, 16384 · 28²; more pixels would never be seen."""
SMALL_PIXELS = 256 * 28 * 28
"""Images below this are stored as PNG: they cost little, and JPEG blurs their few pixels."""
JPEG_MAX_SIDE = 65_500
"""Longer sides do not fit in a JPEG."""


@dataclass(frozen=True)
class RenderSettings:
    """How pages become images."""

    dpi: float = DEFAULT_DPI
    """Resolution of PDF pages. Image files keep their own pixels."""
    max_pixels: int = DEFAULT_MAX_PIXELS
    """Cap on width × height; a larger page is rendered at a lower dpi."""
    image_format: Literal["jpeg", "png"] = "jpeg"
    quality: int = 90
    """JPEG only."""

    def __post_init__(self) -> None:
        if not 0 < self.dpi <= 10_000:
            raise ValueError(f"dpi must be above 0 and at most 10000, got {self.dpi}")
        if self.max_pixels < 28 * 28:
            raise ValueError(f"max_pixels must be at least 784 (28 x 28), got {self.max_pixels}")
        if self.image_format not in ("jpeg", "png"):
            raise ValueError(f"image_format must be jpeg or png, got {self.image_format!r}")

    @property
    def recipe(self) -> str:
        """Everything but the document that decides what a page image is; part of the cache key."""
        codec = f"jpeg{self.quality}" if self.image_format == "jpeg" else "png"
        return f"{RENDERER} dpi={self.dpi:g} max_pixels={self.max_pixels} {codec}"


@dataclass
class RenderedPage:
    """A page written to disk."""

    number: int
    """1-based."""
    file_name: str
    width: int
    height: int
    text: str
    """Of the PDF's text layer; "" for image files and scans."""
    sha256: str
    """Hash of the image file."""


@dataclass
class RenderedPages:
    """Some pages of a document."""

    page_count: int
    """Of the whole document."""
    pages: list[RenderedPage] = field(default_factory=list)
    notes: list[tuple[int, str]] = field(default_factory=list)
    """(page number, what a user should know): a lowered dpi, a page that could not be rendered."""


def is_pdf(path: Path) -> bool:
    return path.suffix.lower() == PDF_SUFFIX


def render_document(
    path: Path, folder: Path, settings: RenderSettings, first: int, count: int
) -> RenderedPages:
    """Render pages `first` … `first + count − 1` (1-based, cut at the end) of a PDF or image file.

    Page images go into `folder`, which must exist. Threads may call this at the same time; PDFium then works
    for one of them at a time. Raises DocumentError when the document cannot be used.
    """
    if is_pdf(path):
        return _render_pdf(path, folder, settings, first, count)
    try:
        return _copy_images(path, folder, settings, first, count)
    except ImageError as error:
        raise DocumentError(str(error)) from None


def joined_notes(notes: Iterable[tuple[int, str]]) -> list[str]:
    """Notes as lines; those that say the same of neighbouring pages become one: "pages 3-5: …"."""
    notes = sorted(notes)
    runs: list[list[tuple[int, str]]] = [notes[:1]] if notes else []
    for before, note in pairwise(notes):
        if note == (before[0] + 1, before[1]):
            runs[-1].append(note)
        else:
            runs.append([note])
    lines = []
    for run in runs:
        (first, text), (last, _) = run[0], run[-1]
        lines.append(f"page {first}: {text}" if first == last else f"pages {first}-{last}: {text}")
    return lines


def _render_pdf(path: Path, folder: Path, settings: RenderSettings, first: int, count: int) -> RenderedPages:
    with open_pdf(path) as pdf:
        done = RenderedPages(page_count=count_pages(pdf))
        for number in range(first, min(first + count, done.page_count + 1)):
            try:
                page = read_page(pdf, number, settings.dpi, settings.max_pixels)
            except DocumentError as error:
                done.notes.append((number, f"left out: {error}"))
                continue
            if page.dpi < settings.dpi:
                asked = f"{page.dpi:.3g} dpi instead of {settings.dpi:g}"
                done.notes.append((number, f"rendered at {asked} to stay within the pixel cap"))
            done.pages.append(_store(page.image, page.text, folder, number, settings))
    return done


def _copy_images(path: Path, folder: Path, settings: RenderSettings, first: int, count: int) -> RenderedPages:
    frames = count_frames(path)
    done = RenderedPages(page_count=frames)
    for number in range(first, min(first + count, frames + 1)):
        _copy_image(path, number - 1, number, folder, settings, done)
    return done


def _copy_image(
    path: Path, frame: int, number: int, folder: Path, settings: RenderSettings, done: RenderedPages
) -> None:
    """Add a frame of an image file as page `number`. Raises ImageError when it cannot be used."""
    image = load_page_image(path, frame=frame)
    shrunk = shrink_to(image, settings.max_pixels)
    if shrunk is not image:
        size = "{} x {}".format(*image.size)
        done.notes.append((number, f"scaled down from {size} to stay within the pixel cap"))
        image = pad_to_usable(shrunk)
    elif count_frames(path) == 1 and is_plain(path):
        done.pages.append(_keep(path, image, folder, number))
        return
    done.pages.append(_store(image, "", folder, number, settings))


def copy_page_files(
    pages: Sequence[PageFile], folder: Path, settings: RenderSettings, first: int, count: int
) -> RenderedPages:
    """Make pages of the images `first` … `first + count − 1` (1-based positions) of a group.

    `page_count` of the result counts the images. One that cannot be used is left out with a note, as a page
    of a PDF is; so are page numbers that no image has. Raises OSError when a file cannot be read.
    """
    done = RenderedPages(page_count=len(pages))
    before = pages[first - 2].number if first > 1 else 0
    for number, path in pages[first - 1 : first - 1 + count]:
        done.notes += [(missing, "there is no image of it") for missing in range(before + 1, number)]
        before = number
        try:
            if (frames := count_frames(path)) > 1:
                done.notes.append((number, f"{path.name} holds {frames} pictures, the first is taken"))
            _copy_image(path, 0, number, folder, settings, done)
        except ImageError as error:
            done.notes.append((number, f"left out: {error}"))
    return done


def _keep(path: Path, image: Image.Image, folder: Path, number: int) -> RenderedPage:
    """Keep an image file byte for byte: encoding it again would only lose quality."""
    data = path.read_bytes()
    target = folder / f"{number:05d}{path.suffix.lower()}"
    target.write_bytes(data)
    return RenderedPage(number, target.name, *image.size, "", hashlib.sha256(data).hexdigest())


def _store(
    image: Image.Image, text: str, folder: Path, number: int, settings: RenderSettings
) -> RenderedPage:
    buffer = io.BytesIO()
    small = image.width * image.height < SMALL_PIXELS
    if settings.image_format == "jpeg" and not small and max(image.size) <= JPEG_MAX_SIDE:
        # 4:4:4: subsampled colour smears small coloured text.
        image.save(buffer, "JPEG", quality=settings.quality, subsampling=0)
        suffix = "jpg"
    else:
        image.convert("RGB").save(buffer, "PNG")
        suffix = "png"
    target = folder / f"{number:05d}.{suffix}"
    target.write_bytes(buffer.getbuffer())
    digest = hashlib.sha256(buffer.getbuffer()).hexdigest()
    return RenderedPage(number, target.name, *image.size, text, digest)
