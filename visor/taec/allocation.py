"""Visual detail allocation: the pixels each re-presented image gets (TAEC, eq. 4 and appendix A.5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from visor.models.smart_resize import FACTOR
from visor.taec.config import AllocationConfig

TOKEN_AREA = FACTOR * FACTOR
"""Pixels of one image token."""


@dataclass(frozen=True)
class RetainedImage:
    """An image of V_t, chosen by energy; allocation decides its pixels only."""

    relevance: float
    """r_i = Ω_i, not negative."""
    detail: float = 1.0
    """d_i in [0, 1], see `detail_demand`."""
    support: float = 1.0
    """c_i; 1 in the paper's runs."""
    is_crop: bool = False


def detail_demand(caption_chars: int, longest_caption_chars: int, slot_support: float) -> float:
    """d_i of a page: mean of its caption's length relative to the corpus's longest and its slot support.

    `slot_support`: a_i, the share of the question's slots that occur in the caption, in [0, 1].
    The paper folds the slot score into the length without a formula; the plain mean is ours. Crops have 1.
    """
    length = caption_chars / longest_caption_chars if longest_caption_chars else 0.0
    return (min(length, 1.0) + slot_support) / 2


def shares(
    budget: float,
    relevance: Sequence[float],
    detail: Sequence[float],
    support: Sequence[float],
    *,
    kappa: float,
    tau: float,
) -> list[float]:
    """Eq. 4: pixels of each image, before any limit; they sum to `budget`.

    κ = 1 is the plain rule, budget · r_i / Σ r, exactly. Without any relevance (Σ r = 0) the first term is
    uniform.
    """
    if not relevance:
        return []
    total = sum(relevance)
    plain = [r / total if total else 1 / len(relevance) for r in relevance]
    scores = [tau * r * d * c for r, d, c in zip(relevance, detail, support, strict=True)]
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    weight_sum = sum(weights)
    return [
        budget * (kappa * share + (1 - kappa) * weight / weight_sum) for share, weight in zip(plain, weights)
    ]


def fit_to_limits(pixels: Sequence[float], budget: float, low: int, high: int) -> list[int]:
    """Whole pixels between `low` and `high` for each image, summing to at most `budget`.

    Shares within the limits stay as they are. Otherwise all are scaled by one factor before clipping, so
    that what a capped image leaves goes to the others and what a raised one needs comes from them, in
    proportion. Pixels are lost only when every image is at `high`. When even `low` each does not fit, the
    images of the smallest shares get 0, which means that they are not shown.
    """
    if not pixels:
        return []
    fitting = int(budget // low)
    if fitting < len(pixels):
        shown = set(sorted(range(len(pixels)), key=lambda index: (-pixels[index], index))[:fitting])
        return [low if index in shown else 0 for index in range(len(pixels))]
    if all(low <= value <= high for value in pixels) and sum(pixels) <= budget:
        return [math.floor(value) for value in pixels]
    factor = _scale(pixels, min(budget, len(pixels) * high), low, high)
    return [math.floor(value) for value in _clipped(pixels, factor, low, high)]


def _clipped(pixels: Sequence[float], factor: float, low: int, high: int) -> list[float]:
    return [min(max(value * factor, low), high) for value in pixels]


def _scale(pixels: Sequence[float], target: float, low: int, high: int) -> float:
    """The largest factor at which the clipped shares sum to at most `target`, by bisection.

    The factor is sought on a logarithmic scale, since a softmax share may be many orders below the others;
    one under a millionth of a pixel is left at `low`.
    """
    positive = [value for value in pixels if value > 1e-6]
    if not positive:
        return 1.0
    below, above = 0.99 * low / max(positive), 1.01 * high / min(positive)
    if sum(_clipped(pixels, above, low, high)) <= target:
        return above
    while below < (middle := math.sqrt(below * above)) < above:
        if sum(_clipped(pixels, middle, low, high)) <= target:
            below = middle
        else:
            above = middle
    return below


def pressure(text_tokens: int, onset: int) -> float:
    """x = clip((text_tokens − onset) / onset, 0, 1): how far the prompt's text has grown past its onset."""
    return min(max((text_tokens - onset) / onset, 0.0), 1.0)


def visual_budget(text_tokens: int, config: AllocationConfig) -> float:
    """B_t = B_0 · (1 + factor · x) in pixels; B_0 with the `pressure` switch off."""
    if not config.pressure:
        return float(config.budget_pixels)
    x = pressure(text_tokens, config.pressure_onset_tokens)
    return config.budget_pixels * (1 + config.pressure_factor * x)


def scaled(
    config: AllocationConfig, page_max_pixels: int, crop_max_pixels: int | None = None
) -> AllocationConfig:
    """The settings for pages that are shown at `page_max_pixels` when fresh, in place of the configured ones.

    Every budget and limit keeps its proportion to a page, so that the same settings bind on small pages; no
    picture is shown larger than when it was fresh. A limit is at least one image token.
    """
    factor = page_max_pixels / config.page_max_pixels
    crop_limit = max(round(config.crop_max_pixels * factor), TOKEN_AREA)
    return config.model_copy(
        update={
            "budget_pixels": max(round(config.budget_pixels * factor), TOKEN_AREA),
            "min_pixels": max(round(config.min_pixels * factor), TOKEN_AREA),
            "page_max_pixels": page_max_pixels,
            "crop_max_pixels": min(crop_limit, crop_max_pixels or crop_limit),
        }
    )


def allocate(images: Sequence[RetainedImage], text_tokens: int, config: AllocationConfig) -> list[int]:
    """Pixels of each image, in the order of `images`; they sum to at most B_t.

    Pages and crops are separate groups: eq. 4 acts within each, clipped to the group's limits. When both are
    present the crops share `crop_share` of the budget; what a group cannot use is not moved to the other.
    """
    budget = visual_budget(text_tokens, config)
    groups = [[i for i, image in enumerate(images) if image.is_crop is is_crop] for is_crop in (False, True)]
    crop_share = config.crop_share if all(groups) else float(bool(groups[1]))
    limits = (config.page_max_pixels, config.crop_max_pixels)
    result = [0] * len(images)
    for group, share, high in zip(groups, (1 - crop_share, crop_share), limits):
        members = [images[index] for index in group]
        pixels = shares(
            budget * share,
            [image.relevance for image in members],
            [image.detail if config.detail else 1.0 for image in members],
            [image.support for image in members],
            kappa=config.kappa,
            tau=config.tau,
        )
        for index, value in zip(group, fit_to_limits(pixels, budget * share, config.min_pixels, high)):
            result[index] = value
    return result
