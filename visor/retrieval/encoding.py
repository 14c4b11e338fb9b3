"""What turns queries and pages into vectors, and how it is named, so that no index meets another's vectors.

Axes in names: T tokens, D dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from visor.types import Page, PageStore, Record


class EncoderIdentity(Record):
    """Everything that decides what vectors an encoder gives; kept in the manifest of an index."""

    name: str
    """Hub name or the checkpoint's folder name."""
    kind: Literal["single", "multi"]
    """One vector a page, or one for each of its tokens (late interaction)."""
    dimension: int
    pooling: str
    """How a page's token vectors become what is stored: "mean", "last", "none", …"""
    revision: str = ""
    weights_hash: str = ""
    processor_hash: str = ""
    dtype: str = "float32"
    """Of the computation."""
    max_visual_tokens: int | None = None
    """Cap on a page's image tokens; None = no page image is read."""
    reads: Literal["text", "image"] = "text"


@dataclass(frozen=True)
class QueryVectors:
    """A query's vectors; a type of its own, so that query and page cannot be swapped in a score."""

    vectors_TD: np.ndarray
    """float32; T = 1 for a single-vector encoder."""


@dataclass(frozen=True)
class PageVectors:
    """A page's vectors. T may be 0: an empty page, which matches nothing."""

    vectors_TD: np.ndarray
    """float32 or float16."""


class Encoder(Protocol):
    @property
    def identity(self) -> EncoderIdentity: ...

    def encode_queries(self, texts: Sequence[str]) -> list[QueryVectors]: ...

    def encode_pages(self, pages: Sequence[Page], store: PageStore) -> list[PageVectors]:
        """Vectors of each page; reads text and caption, or images from `store`, as `identity.reads` says."""
        ...

    def libraries(self) -> dict[str, str]:
        """Versions recorded in the manifest."""
        ...
