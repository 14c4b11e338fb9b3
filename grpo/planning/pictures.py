"""How many image tokens a page or a crop can take: its size and its budget decide.

A budget bounds the area of a picture, but the smart resize rounds both sides to whole tokens, so what is
shown can be less than the budget and, for narrow budgets and long pictures, more. What counts here is what is
shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from visor.env.config import EpisodeConfig
from visor.env.crop import MIN_SIDE
from visor.models.smart_resize import MAX_RATIO, smart_resize

Size = tuple[int, int]
"""(width, height) in pixels."""

ASSUMED_SIDES: Size = (4096, 4096)
"""Largest picture where no corpus says which there are."""
EVERY_SIDE_UP_TO = 1024
"""Longer sides are tried in steps of one token: how a long side is rounded hardly matters."""


@dataclass(frozen=True)
class Budget:
    """Bounds on width × height after the smart resize, in pixels."""

    min_pixels: int
    max_pixels: int
    factor: int
    """Pixels of the side of an image token."""

    def tokens(self, size: Size) -> int:
        """Image tokens of a picture. ValueError for one longer than 200:1."""
        width, height = smart_resize(
            *size, min_pixels=self.min_pixels, max_pixels=self.max_pixels, factor=self.factor
        )
        return width * height // self.factor**2

    @property
    def token_range(self) -> tuple[int, int]:
        """The bounds in tokens, as they are meant."""
        return self.min_pixels // self.factor**2, self.max_pixels // self.factor**2


def page_budget(episode: EpisodeConfig, factor: int) -> Budget:
    return Budget(episode.page_min_pixels, episode.page_max_pixels, factor)


def crop_budget(episode: EpisodeConfig, factor: int) -> Budget:
    return Budget(episode.crop_min_pixels, episode.crop_max_pixels, factor)


def fullest_page(sizes: Iterable[Size], budget: Budget) -> Size:
    """The page with the most image tokens among those of a corpus; pages over 200:1, which cannot be shown,
    are passed over."""
    return max((size for size in set(sizes) if is_showable(size)), key=budget.tokens)


def is_showable(size: Size) -> bool:
    return min(size) >= 1 and max(size) <= MAX_RATIO * min(size)


def fullest_picture(budget: Budget, sides: Size = ASSUMED_SIDES) -> Size:
    """The picture of at most `sides` pixels that takes the most image tokens of a budget.

    Every width and height is tried up to 1,024 pixels, every multiple of the token's side above.
    """
    widths, heights = (_sides(limit, budget.factor) for limit in sides)
    tokens = _tokens(widths[:, None], heights[None, :], budget)
    column, row = np.unravel_index(np.argmax(tokens), tokens.shape)
    return int(widths[column]), int(heights[row])


def _sides(limit: int, factor: int) -> np.ndarray:
    """Lengths of a side from the least that a crop may have; a page is never smaller either."""
    every = np.arange(min(MIN_SIDE, limit), min(limit, EVERY_SIDE_UP_TO) + 1)
    steps = np.arange(factor, limit + 1, factor)
    return np.unique(np.concatenate([every, steps[steps > EVERY_SIDE_UP_TO], [limit]])).astype(np.float64)


def _tokens(widths: np.ndarray, heights: np.ndarray, budget: Budget) -> np.ndarray:
    """Image tokens of each width and height, 0 beyond 200:1: `smart_resize` for arrays."""
    factor = budget.factor
    area = widths * heights
    columns, rows = (np.maximum(1.0, np.round(side / factor)) for side in (widths, heights))
    rounded = columns * rows * factor**2
    shrink = np.sqrt(area / budget.max_pixels)
    shrunk = [np.maximum(1.0, np.floor(side / shrink / factor)) for side in (widths, heights)]
    grow = np.sqrt(budget.min_pixels / area)
    grown = [np.ceil(side * grow / factor) for side in (widths, heights)]
    tokens = np.where(rounded < budget.min_pixels, grown[0] * grown[1], columns * rows)
    tokens = np.where(rounded > budget.max_pixels, shrunk[0] * shrunk[1], tokens)
    too_long = np.maximum(widths, heights) > MAX_RATIO * np.minimum(widths, heights)
    return np.where(too_long, 0, tokens)
