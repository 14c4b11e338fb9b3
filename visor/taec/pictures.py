"""Operator V for one question: pixels for retained pictures, and the record of how they came about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from visor.taec.allocation import RetainedImage, allocate, detail_demand, scaled, visual_budget
from visor.taec.captions import Captions
from visor.taec.config import AllocationConfig


@dataclass(frozen=True)
class MemoryPicture:
    """A picture of memory and what it counts for."""

    page_id: str
    energy: float
    """r_i = Ω_i."""
    is_crop: bool = False


class PictureBudgets:
    """Eq. 4 with the detail demand of each picture: a crop's is 1, a page's comes from caption and slots."""

    def __init__(self, config: AllocationConfig, captions: Captions, slots: Sequence[str]) -> None:
        self.config = config
        self.captions = captions
        self.slots = slots
        self.record: list[dict] = []
        """One entry a call of `allocate`."""

    def allocate(
        self,
        pictures: Sequence[MemoryPicture],
        *,
        text_tokens: int,
        searches: int,
        page_max_pixels: int,
        crop_max_pixels: int | None = None,
    ) -> list[int]:
        """Pixels of each picture, in order; they sum to at most B_t (`scaled` to a fresh page's pixels)."""
        images = [
            RetainedImage(p.energy, 1.0 if p.is_crop else self._detail(p.page_id), is_crop=p.is_crop)
            for p in pictures
        ]
        config = scaled(self.config, page_max_pixels, crop_max_pixels)
        pixels = allocate(images, text_tokens, config)
        shown = [
            {
                "page_id": picture.page_id,
                "crop": picture.is_crop,
                "energy": round(picture.energy, 6),
                "detail": round(image.detail, 6),
                "pixels": value,
            }
            for picture, image, value in zip(pictures, images, pixels)
        ]
        budget = int(visual_budget(text_tokens, config))
        self.record.append(
            {"searches": searches, "text_tokens": text_tokens, "budget": budget, "pictures": shown}
        )
        return pixels

    def _detail(self, page_id: str) -> float:
        """d_i of a page."""
        support = self.captions.support(page_id, self.slots)
        return detail_demand(len(self.captions.text(page_id)), self.captions.longest, support)
