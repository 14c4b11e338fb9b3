"""The size at which Qwen2.5-VL sees an image."""

from __future__ import annotations

import math

FACTOR = 28
"""Patch size 14 × spatial merge 2: sides are multiples of it, and one image token covers FACTOR² pixels."""
MAX_RATIO = 200


def smart_resize(
    width: int, height: int, *, min_pixels: int, max_pixels: int, factor: int = FACTOR
) -> tuple[int, int]:
    """Return the (width, height) shown to the model: multiples of `factor`, area within the bounds.

    Same rounding as the `smart_resize` of Transformers' Qwen2-VL image processor (tested against it). Where
    the bounds are so close that one step of `factor` leads from below the one to above the other, the area
    can miss one of them by that step; it keeps to the bounds of an episode's defaults for every image.
    Raises ValueError for an empty image or a ratio of sides above 200.
    """
    if width < 1 or height < 1:
        raise ValueError(f"an image of {width}x{height} pixels has no area")
    if max(width, height) / min(width, height) > MAX_RATIO:
        raise ValueError(f"an image of {width}x{height} pixels is longer than {MAX_RATIO}:1")
    new_height = max(factor, round(height / factor) * factor)
    new_width = max(factor, round(width / factor) * factor)
    if new_width * new_height > max_pixels:
        scale = math.sqrt(width * height / max_pixels)
        new_height = max(factor, math.floor(height / scale / factor) * factor)
        new_width = max(factor, math.floor(width / scale / factor) * factor)
    elif new_width * new_height < min_pixels:
        scale = math.sqrt(min_pixels / (width * height))
        new_height = math.ceil(height * scale / factor) * factor
        new_width = math.ceil(width * scale / factor) * factor
    return new_width, new_height
