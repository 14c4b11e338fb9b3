"""Settings of the systems other than VISOR; the defaults are the TAEC paper's (appendices A.1, A.8, B)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from visor.config import Config
from visor.models.smart_resize import FACTOR

TOKEN_AREA = FACTOR * FACTOR
"""Pixels of one image token."""


class LoopConfig(Config):
    """What vanilla, react and dag share, and what one of them alone reads."""

    protocol: Literal["auto", "native", "text"] = "auto"
    """How react and dag make calls. native: tool calls of the endpoint. text: in tags. auto: native where the
    client takes tools, in tags otherwise and after an endpoint has refused tools."""
    tool_choice: Literal["auto", "required"] = "auto"
    """Of native calls. auto: the model decides whether it calls a tool. required: the endpoint makes it call
    one, for models that answer in plain text otherwise."""
    max_calls: int = Field(20, ge=1)
    """Calls of a question; a forced-answer call and a plain question follow when none of them answered."""
    pages_per_search: int = Field(5, ge=1)
    """K: pages that one search puts into the context."""
    page_min_pixels: int = Field(4 * TOKEN_AREA, ge=TOKEN_AREA)
    page_max_pixels: int = Field(300_000, ge=TOKEN_AREA)
    """Width × height at which a page that a search has just found is shown."""
    prompts: str | None = None
    """`tiny` (vanilla and react), or the YAML file of a wording of your own; null = the system's own."""
    visual_budget: int = Field(0, ge=0)
    """react: B in pixels; each of the n pictures in the context is shown at min(page_max_pixels, B/n). 0 = no
    cap."""
    captions: bool = True
    """react: a page's caption stands beside its picture."""
    memory_images: int = Field(5, ge=0)
    """dag: pictures of earlier searches that are shown again."""
    memory_pixels: int = Field(600_000, ge=TOKEN_AREA)
    """dag: B_0, shared by the pictures shown again."""
    memory_pressure_onset_tokens: int | None = Field(None, gt=0)
    """dag: text tokens from which B_0 grows with the prompt (the paper's substrate: 4000); null = it is
    fixed."""
