"""One document file → page images on disk and page texts. Runs in a worker process.

PDFium is not thread-safe, even across documents: this module is called from one thread of a process at a
time, and `data.workers` spreads the work over processes.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import math
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pypdfium2
import pypdfium2.raw as pdfium_c
from PIL import Image

from data.images import (
    ImageError,
    count_frames,
    is_plain,
    load_page_image,
    pad_to_usable,
    shrink_to,
    usable_size,
)
from data.sources import PageFile

PDF_SUFFIX = ".pdf"
POINTS_PER_INCH = 72
DEFAULT_DPI = 144
DEFAULT_MAX_PIXELS = 12_845_056
"""The largest image that Qwen2.5-VL takes, 16384 · 28²; more pixels would never be seen."""
SMALL_PIXELS = 256 * 28 * 28
"""Images below this are stored as PNG: they cost little, and JPEG blurs their few pixels."""
RENDERER = f"pypdfium2 {pypdfium2.PYPDFIUM_INFO.version} pdfium {pypdfium2.PDFIUM_INFO.build}"


class DocumentError(ValueError):
    """A document that cannot be used; the message names the file and says why."""


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
        if not self.dpi > 0:
            raise ValueError(f"dpi must be above 0, got {self.dpi}")
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
    sha256: str


@dataclass
class RenderedPages:
    """Some pages of a document."""

    page_count: int
    """Of the whole document."""
    pages: list[RenderedPage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a user should know: a lowered dpi, a page that could not be rendered."""


def is_pdf(path: Path) -> bool:
    return path.suffix.lower() == PDF_SUFFIX


def render_document(
    path: Path, folder: Path, settings: RenderSettings, first: int, count: int
) -> RenderedPages:
    """Render pages `first` … `first + count − 1` (1-based, cut at the end) of a PDF or image file.

    Page images go into `folder`, which must exist. Raises DocumentError when the document cannot be used.
    """
    if is_pdf(path):
        return _render_pdf(path, folder, settings, first, count)
    try:
        return _copy_images(path, folder, settings, first, count)
    except ImageError as error:
        raise DocumentError(str(error)) from None


# ---------------------------------------------------------------- PDF


def open_pdf(path: Path) -> pypdfium2.PdfDocument:
    """Open a PDF without a password. Raises DocumentError in words: not a PDF, locked, no pages."""
    with path.open("rb") as stream:
        head = stream.read(1024)
    if not head:
        raise DocumentError(f"{path.name} is not a PDF: the file is empty")
    _prime_last_error()
    try:
        pdf = pypdfium2.PdfDocument(path)
    except pypdfium2.PdfiumError as error:
        raise DocumentError(_why_unreadable(path.name, head, error.err_code)) from None
    if len(pdf) == 0:
        pdf.close()
        raise DocumentError(f"{path.name} has no pages")
    if pdf.get_formtype():
        pdf.init_forms()  # the values of filled-in forms are part of what a reader sees
    return pdf


def _prime_last_error() -> None:
    """Set PDFium's last error to "file".

    PDFium refuses a document without pages but leaves the last error as it was, so the reason would be that
    of an earlier document. After this call, "file" for a file that we could read means: no pages.
    """
    pdfium_c.FPDF_LoadDocument(ctypes.create_string_buffer(b""), None)


def _why_unreadable(name: str, head: bytes, code: int) -> str:
    if code == pdfium_c.FPDF_ERR_PASSWORD:
        return f"{name} is password-protected; remove the password and ingest it again"
    if code == pdfium_c.FPDF_ERR_SECURITY:
        return f"{name} is encrypted in a way that PDFium does not support"
    if b"%PDF-" not in head:
        return f"{name} is not a PDF (it does not start like one)"
    if code == pdfium_c.FPDF_ERR_FILE:
        return f"{name} has no pages"
    return f"{name} is a damaged PDF that cannot be read"


def _render_pdf(path: Path, folder: Path, settings: RenderSettings, first: int, count: int) -> RenderedPages:
    pdf = open_pdf(path)
    try:
        done = RenderedPages(page_count=len(pdf))
        for number in range(first, min(first + count, len(pdf) + 1)):
            try:
                page = pdf[number - 1]
            except pypdfium2.PdfiumError as error:
                done.notes.append(f"page {number} left out: {error}")
                continue
            image, note = _render_page(page, settings)
            if note:
                done.notes.append(f"page {number}: {note}")
            text = clean_text(page.get_textpage().get_text_bounded())
            done.pages.append(_store(image, text, folder, number, settings))
            page.close()
        return done
    finally:
        pdf.close()


def _render_page(page: pypdfium2.PdfPage, settings: RenderSettings) -> tuple[Image.Image, str]:
    """Render one page, /Rotate applied, at the asked dpi or the highest that keeps within the pixel cap."""
    width, height = page.get_size()
    scale = fit_scale(width, height, settings.dpi / POINTS_PER_INCH, settings.max_pixels)
    # PDFium draws a side of less than one pixel as nothing at all.
    image = pad_to_usable(page.render(scale=scale).to_pil().convert("RGB"))
    dpi = scale * POINTS_PER_INCH
    if dpi < settings.dpi:
        return image, f"rendered at {dpi:.3g} dpi instead of {settings.dpi:g} to stay within the pixel cap"
    return image, ""


def fit_scale(width: float, height: float, scale: float, max_pixels: int) -> float:
    """The largest scale ≤ `scale` at which a page of width × height points has at most `max_pixels`.

    The cap holds for the stored image: PDFium rounds each side up, and very long pages are padded.
    """

    def pixels(scale: float) -> int:
        return math.prod(usable_size(math.ceil(width * scale), math.ceil(height * scale)))

    if pixels(scale) > max_pixels:
        scale = min(scale, math.sqrt(max_pixels / (width * height)))
    while pixels(scale) > max_pixels:
        scale *= 0.9995
    return scale


_HYPHEN = "\x02"
"""PDFium's mark for a hyphen at the end of a line: the word goes on."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffe\uffff\ud800-\udfff]")


def clean_text(text: str) -> str:
    """Text layer → lines of printable text; a word hyphenated over a line end is joined."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = re.sub(f"(?<=\\w){_HYPHEN}\n?(?=\\w)", "", text)
    return _CONTROL.sub(" ", text).strip()


# ---------------------------------------------------------------- image files


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
        done.notes.append(f"page {number}: scaled down from {size} to stay within the pixel cap")
        image = pad_to_usable(shrunk)
    elif count_frames(path) == 1 and is_plain(path):
        done.pages.append(_keep(path, image, folder, number))
        return
    done.pages.append(_store(image, "", folder, number, settings))


def _keep(path: Path, image: Image.Image, folder: Path, number: int) -> RenderedPage:
    """Keep an image file byte for byte: encoding it again would only lose quality."""
    target = folder / f"{number:05d}{path.suffix.lower()}"
    shutil.copyfile(path, target)
    return RenderedPage(number, target.name, *image.size, "", _sync_and_hash(target))


def copy_page_files(
    pages: Sequence[PageFile], folder: Path, settings: RenderSettings, first: int, count: int
) -> RenderedPages:
    """Make pages of the images `first` … `first + count − 1` (1-based positions) of a group.

    `page_count` of the result counts the images. One that cannot be used is left out with a note, as a page
    of a PDF is; page numbers that no image has are noted with the first images.
    """
    done = RenderedPages(page_count=len(pages))
    if first == 1:
        done.notes += _gaps([page.number for page in pages])
    for number, path in pages[first - 1 : first - 1 + count]:
        try:
            if (frames := count_frames(path)) > 1:
                done.notes.append(f"page {number}: {path.name} holds {frames} pictures, the first is taken")
            _copy_image(path, 0, number, folder, settings, done)
        except ImageError as error:
            done.notes.append(f"page {number} left out: {error}")
    return done


def _gaps(numbers: Sequence[int]) -> list[str]:
    """A note for the page numbers below the last that are not among `numbers` (ascending)."""
    spans = []
    for before, after in zip([0, *numbers], numbers):
        if after - before == 2:
            spans.append(str(before + 1))
        elif after - before > 2:
            spans.append(f"{before + 1}–{after - 1}")
    return [f"there is no image of page {', '.join(spans)}"] if spans else []


def _store(
    image: Image.Image, text: str, folder: Path, number: int, settings: RenderSettings
) -> RenderedPage:
    buffer = io.BytesIO()
    if settings.image_format == "jpeg" and image.width * image.height >= SMALL_PIXELS:
        # 4:4:4: subsampled colour smears small coloured text.
        image.save(buffer, "JPEG", quality=settings.quality, subsampling=0)
        suffix = "jpg"
    else:
        image.save(buffer, "PNG")
        suffix = "png"
    target = folder / f"{number:05d}.{suffix}"
    target.write_bytes(buffer.getbuffer())
    return RenderedPage(number, target.name, *image.size, text, _sync_and_hash(target))


def _sync_and_hash(path: Path) -> str:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        return hashlib.file_digest(stream, "sha256").hexdigest()
