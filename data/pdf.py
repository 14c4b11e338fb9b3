"""PDF pages → pictures and texts, through PDFium.

PDFium is not thread-safe, even across documents. Threads of a process may call `read_pages`: one lock, held
for every call into the library, lets them take turns page by page. Work that should go on at the same time is
spread over processes by `data.workers`.
"""

from __future__ import annotations

import ctypes
import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pypdfium2
import pypdfium2.raw as pdfium_c
from PIL import Image

from data.images import pad_to_usable, usable_size

PDF_SUFFIX = ".pdf"
POINTS_PER_INCH = 72
RENDERER = f"pypdfium2 {pypdfium2.PYPDFIUM_INFO.version} pdfium {pypdfium2.PDFIUM_INFO.build}"
MIN_BYTES_PER_PAGE = 8
"""A damaged file may claim millions of pages; even compressed, a page takes more than this."""
PDFIUM = threading.RLock()
"""Held during every call into PDFium. Its objects are closed under it too, never by the garbage collector,
which may run in any thread."""


class DocumentError(ValueError):
    """A document that cannot be used; the message names the file and says why."""


@dataclass(frozen=True)
class PdfPage:
    """A page of a PDF, drawn."""

    number: int
    """1-based."""
    image: Image.Image
    """RGB or RGBX (which JPEG takes as it is), /Rotate applied."""
    text: str
    """The text layer in the order of the page's content stream, which is its reading order as its maker
    wrote it."""
    dpi: float
    """Lower than asked where the page would exceed the pixel cap."""


@contextmanager
def open_pdf(path: Path) -> Iterator[pypdfium2.PdfDocument]:
    """Open a PDF without a password. Raises DocumentError in words: not a PDF, locked, no pages."""
    with path.open("rb") as stream:
        head = stream.read(1024)
    if not head:
        raise DocumentError(f"{path.name} is not a PDF: the file is empty")
    with PDFIUM:
        pdf = _open(path, head)
    try:
        yield pdf
    finally:
        with PDFIUM:
            pdf.close()


def _open(path: Path, head: bytes) -> pypdfium2.PdfDocument:
    _prime_last_error()
    try:
        pdf = pypdfium2.PdfDocument(path)
    except pypdfium2.PdfiumError as error:
        raise DocumentError(_why_unreadable(path.name, head, error.err_code)) from None
    count = len(pdf)
    if count == 0 or count * MIN_BYTES_PER_PAGE > path.stat().st_size:
        pdf.close()
        why = "has no pages" if count == 0 else f"is damaged: it claims {count} pages, more than it can hold"
        raise DocumentError(f"{path.name} {why}")
    if pdf.get_formtype():
        pdf.init_forms()  # the values of filled-in forms are part of what a reader sees
    return pdf


def count_pages(pdf: pypdfium2.PdfDocument) -> int:
    """Pages of an open PDF."""
    with PDFIUM:
        return len(pdf)


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


def read_page(pdf: pypdfium2.PdfDocument, number: int, dpi: float, max_pixels: int) -> PdfPage:
    """Draw page `number` (1-based) at `dpi`, or at the highest resolution that keeps within `max_pixels`, and
    take its text. Raises DocumentError when this page cannot be drawn."""
    with PDFIUM:
        try:
            page = pdf[number - 1]
        except pypdfium2.PdfiumError as error:
            raise DocumentError(str(error).rstrip(".")) from None
        try:
            image, drawn_dpi = _draw(page, dpi, max_pixels)
            return PdfPage(number, image, _text(page), drawn_dpi)
        except (pypdfium2.PdfiumError, ArithmeticError, ValueError, MemoryError) as error:
            raise DocumentError(f"it cannot be drawn ({type(error).__name__}: {error})") from None
        finally:
            page.close()


def _draw(page: pypdfium2.PdfPage, dpi: float, max_pixels: int) -> tuple[Image.Image, float]:
    width, height = page.get_size()
    if not (0 < width < math.inf and 0 < height < math.inf):
        raise ValueError(f"its size is {width:g} x {height:g} points")
    scale = fit_scale(width, height, dpi / POINTS_PER_INCH, max_pixels)
    # Four bytes a pixel in Pillow's order: drawn faster than three, and shared instead of copied.
    bitmap = page.render(scale=scale, rev_byteorder=True, prefer_bgrx=True)
    size = (bitmap.width, bitmap.height)
    if bitmap.mode == "RGBX":
        image = Image.frombuffer("RGBX", size, bitmap.buffer, "raw", "RGBX", bitmap.stride, 1)
    else:  # a grey page
        image = bitmap.to_pil().convert("RGB")
    bitmap.close()
    if usable_size(*size) != size:  # PDFium draws a side of less than one pixel as nothing at all
        image = pad_to_usable(image.convert("RGB"))
    return image, scale * POINTS_PER_INCH


def _text(page: pypdfium2.PdfPage) -> str:
    textpage = page.get_textpage()
    try:
        text = clean_text(textpage.get_text_bounded())
        return text if any(map(str.isalnum, text)) else ""  # bullets and rules of a scan are no text
    finally:
        textpage.close()


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
