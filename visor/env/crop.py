"""Boxes: from what the policy wrote to a region of the stored page, and the picture of that region.

The one mapping of the project: episodes, SFT data and evaluation all come through `crop_region`.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from visor.models.smart_resize import MAX_RATIO
from visor.stage_clock import CLOCK
from visor.types import Box, Crop, ImageRef, PageStore

if TYPE_CHECKING:
    from PIL.Image import Image

Size = tuple[int, int]
NORM = 1000
MIN_SIDE = 28
"""Least side of a crop in pixels of the stored page, margin included: one image token at the page's own
resolution. The smart resize would enlarge anything smaller, so its result cannot tell."""


class InvalidBox(ValueError):
    """The box names no usable region; the message is the reason given to the policy."""


def to_page_box(box: tuple[float, float, float, float], space: str, page: Size, seen: Size) -> Box:
    """Map a box to pixels of the stored page, clamped to it, before the margin.

    `page` is the (width, height) of the stored page, `seen` the size at which the policy saw it; `seen`
    counts in the space `pixels` only. The corners may come in any order: they are sorted, since two
    opposite corners name one region however they are written. Raises InvalidBox for a coordinate that is
    not finite, a side under one unit of the space (fractions of the page such as [0.1,0.2,0.5,0.6] among
    them), and a box that leaves no pixel on the page.
    """
    if not all(math.isfinite(value) for value in box):
        raise InvalidBox("a coordinate of the box is not a finite number")
    (x1, x2), (y1, y2) = sorted((box[0], box[2])), sorted((box[1], box[3]))
    if x2 - x1 < 1 or y2 - y1 < 1:
        raise InvalidBox("the box is empty or thinner than one unit")
    units = (NORM, NORM) if space == "norm1000" else seen
    scale_x, scale_y = page[0] / units[0], page[1] / units[1]
    left, right = _clamp(x1 * scale_x, page[0]), _clamp(x2 * scale_x, page[0])
    top, bottom = _clamp(y1 * scale_y, page[1]), _clamp(y2 * scale_y, page[1])
    if left >= right or top >= bottom:
        raise InvalidBox("the box lies outside the page or covers no pixel of it")
    return left, top, right, bottom


def _clamp(value: float, limit: int) -> int:
    # Clamped first: a scaled coordinate may be beyond what a float holds, and infinity has no rounding.
    return round(min(max(value, 0.0), float(limit)))


def expand(box: Box, margin: int, page: Size) -> Box:
    """Grow a box by `margin` page pixels on each side, within the page (VISOR appendix A)."""
    left, top, right, bottom = box
    return (
        max(left - margin, 0),
        max(top - margin, 0),
        min(right + margin, page[0]),
        min(bottom + margin, page[1]),
    )


def crop_region(crop: Crop, page: Size, seen: Size, *, margin: int) -> Box:
    """Return the region of the stored page that a crop action shows: mapped, clamped, with its margin.

    Raises InvalidBox when the box is unusable (`to_page_box`), and for a region with a side under MIN_SIDE
    page pixels or sides beyond 200:1, which the smart resize does not take.
    """
    region = expand(to_page_box(crop.box, crop.space, page, seen), margin, page)
    shorter, longer = sorted((region[2] - region[0], region[3] - region[1]))
    if shorter < MIN_SIDE:
        raise InvalidBox(f"the region of the box is under {MIN_SIDE} pixels a side")
    if longer > MAX_RATIO * shorter:
        raise InvalidBox("the region of the box is too long and thin to be shown")
    return region


def size_in_context(refs: Sequence[ImageRef], sizes: Sequence[Size], page_id: str) -> Size:
    """The (width, height) at which the latest full picture of a page was seen.

    `refs` are the images of the context and `sizes` what the client reports for each, in order.
    """
    assert len(refs) == len(sizes), f"{len(refs)} images were shown, the client reports {len(sizes)} sizes"
    seen = [size for ref, size in zip(refs, sizes) if ref.page_id == page_id and ref.box is None]
    assert seen, f"page {page_id!r} is not in the context"
    return seen[-1]


class ImageCutter:
    """Gives the picture of an image reference: the stored page or a region cut from it, not resized.

    Decoded pages are kept, the `cache_size` most recently used of them. Safe to call from several threads.
    """

    def __init__(self, store: PageStore, cache_size: int = 64) -> None:
        self._store = store
        self._cache_size = cache_size
        self._pages: OrderedDict[str, Image] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, ref: ImageRef) -> Image:
        """Return the picture, RGB; the caller must not change it. Raises what the store raises for an unknown
        page, and ValueError for a box beyond the page (the corpus is then not the one of the record)."""
        with CLOCK.running("crop", ref.page_id):
            return self._cut(ref)

    def _cut(self, ref: ImageRef) -> Image:
        page = self._page(ref.page_id)
        if ref.box is None:
            return page
        left, top, right, bottom = ref.box
        if not (0 <= left < right <= page.width and 0 <= top < bottom <= page.height):
            raise ValueError(
                f"box {ref.box} does not lie in page {ref.page_id!r} of {page.width}x{page.height} pixels; "
                "is this the corpus the record was made with?"
            )
        return page.crop(ref.box)

    def _page(self, page_id: str) -> Image:
        with self._lock:
            if page_id in self._pages:
                self._pages.move_to_end(page_id)
                return self._pages[page_id]
        image = self._store.image(page_id)
        image.load()
        with self._lock:
            self._pages[page_id] = image
            self._pages.move_to_end(page_id)
            while len(self._pages) > self._cache_size:
                self._pages.popitem(last=False)
        return image
