"""Page pictures for the report: small JPEGs as data URIs."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from visor.types import Box, PageStore

if TYPE_CHECKING:
    from PIL.Image import Image

PAGE_SIDE = 640
CROP_SIDE = 480
SHOWN_SIDE = 420
"""Longest side on the screen, CSS pixels; the thumbnails are larger, for screens of high density."""
QUALITY = 72


@dataclass(frozen=True)
class Picture:
    uri: str
    """`data:image/jpeg;base64,…`."""
    source_size: tuple[int, int]
    """(width, height) of the stored page; boxes refer to it."""
    shown_width: int
    """Width on the screen, CSS pixels."""


class Pictures:
    """Thumbnails from a corpus, each made once. Without a corpus, or for a page it lacks, there is none."""

    def __init__(self, store: PageStore | None) -> None:
        self.store = store
        self.missing: set[str] = set()
        """Pages that were asked for and could not be shown."""
        self._made: dict[tuple[str, Box | None], Picture | None] = {}

    def get(self, page_id: str, box: Box | None = None) -> Picture | None:
        """The page, or the region `box` of it (page pixels)."""
        key = (page_id, box)
        if key not in self._made:
            self._made[key] = self._make(page_id, box)
        return self._made[key]

    def _make(self, page_id: str, box: Box | None) -> Picture | None:
        if self.store is None:
            return None
        try:
            image = self.store.image(page_id)
        except (KeyError, ValueError, OSError):
            self.missing.add(page_id)
            return None
        size = image.size
        image = (image.crop(box) if box else image).convert("RGB")
        image.thumbnail((CROP_SIDE, CROP_SIDE) if box else (PAGE_SIDE, PAGE_SIDE))
        shown_width = max(1, round(image.width * min(1.0, SHOWN_SIDE / max(image.size))))
        return Picture(_data_uri(image), size, shown_width)


def _data_uri(image: Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=QUALITY, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
