"""Settings of an episode; they are recorded with every trajectory."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from visor.models.smart_resize import FACTOR
from visor.types import Record

TOKEN_AREA = FACTOR * FACTOR
"""Pixels of one image token."""


class EpisodeConfig(Record):
    """How one question is played. The defaults are the paper's main setting (VISOR section 4, Table 6)."""

    max_turns: int = Field(10, ge=1)
    """T: policy calls at most. The reply to the last one is final."""
    window: int | None = Field(2, ge=1)
    """W: last turns kept in the context in full; None keeps all (Table 2, without SW)."""
    top_k: int = Field(10, ge=1)
    """Candidates of a search; the first not yet shown becomes the observation."""
    page_min_pixels: int = Field(256 * TOKEN_AREA, ge=TOKEN_AREA)
    page_max_pixels: int = Field(512 * TOKEN_AREA, ge=TOKEN_AREA)
    """Width × height at which the policy sees a page."""
    crop_min_pixels: int = Field(256 * TOKEN_AREA, ge=TOKEN_AREA)
    crop_max_pixels: int = Field(1024 * TOKEN_AREA, ge=TOKEN_AREA)
    """Width × height at which the policy sees a crop."""
    crop_margin: int = Field(28, ge=0)
    """Page pixels added on each side of a box."""
    box_space: Literal["norm1000", "pixels"] = "norm1000"
    """Space of the policy's boxes: 0–1000 of each side, or pixels of the page as the policy saw it."""
    intent_injection: bool = True
    """Every observation restates the question and points at the evidence (Table 2, II)."""
    evidence_space: bool = True
    """The context carries the evidence block, and observations the rules on when to crop and what to do
    after an uninformative crop (Table 2, ES, which stands for both)."""
    min_thought_chars: int = Field(5, ge=0)
    """Thoughts of this many characters or fewer are no evidence."""
    prompts: str = "visor"
    """Name of a shipped prompt set (`visor`, `tiny`) or path of a YAML file."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> EpisodeConfig:
        for kind in ("page", "crop"):
            low, high = getattr(self, f"{kind}_min_pixels"), getattr(self, f"{kind}_max_pixels")
            if low > high:
                raise ValueError(f"{kind}_min_pixels ({low}) is above {kind}_max_pixels ({high})")
        return self
