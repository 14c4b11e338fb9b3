"""The seam for layers such as TAEC: an `EvidencePolicy` decides which evidence enters and how it is shown.

The episode asks it and nothing else; the plain agent is `PassThrough`, from which a layer may inherit what it
leaves alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from visor.env.prompts import PromptSet
from visor.retrieval.base import ScoredPage
from visor.types import ImageRef, Message, Question


@dataclass
class EvidenceEntry:
    """What the policy wrote about one page (eq. 1 of VISOR)."""

    page_id: str
    pre: str | None = None
    """Thought of the turn that first read the page."""
    post: str | None = None
    """Thought of the turn that read its crop."""
    search_index: int = 0
    """0-based search turn that showed the page; also its node in the trajectory graph."""
    in_window: bool = True
    """True while the turn that wrote it is among the last W turns."""

    @property
    def thoughts(self) -> list[str]:
        return [thought for thought in (self.pre, self.post) if thought]


@dataclass(frozen=True)
class ShownPicture:
    """A picture that some turn of the episode has shown."""

    image: ImageRef
    """As that turn showed it."""
    search_index: int
    """0-based search that found its page; its node in the trajectory graph."""
    turn_index: int


@dataclass
class EpisodeView:
    """What an evidence policy may look at; it must not change it."""

    question: Question
    shown_page_ids: list[str] = field(default_factory=list)
    """Pages shown so far, in order."""
    queries: list[str] = field(default_factory=list)
    """Queries of earlier searches, in order."""
    entries: list[EvidenceEntry] = field(default_factory=list)
    pictures: list[ShownPicture] = field(default_factory=list)
    """Pages and crops shown so far, in order."""
    page_max_pixels: int = 0
    """Pixels at which the episode shows a page; budgets are in proportion to it."""
    prompts: PromptSet | None = None
    """The wording around what is shown; None = not told."""


class EvidencePolicy(Protocol):
    name: str

    def pool_size(self, top_k: int) -> int:
        """How many candidates to ask the retriever for."""
        ...

    def select(self, query: str, candidates: Sequence[ScoredPage], view: EpisodeView) -> str | None:
        """The page to show, one of the unseen candidates, or None when there is none."""
        ...

    def render(self, entry: EvidenceEntry, view: EpisodeView) -> list[str]:
        """The lines that stand for an evidence entry in the evidence block; the entry never changes."""
        ...

    def represent(self, earlier: Sequence[ShownPicture], view: EpisodeView) -> list[ShownPicture]:
        """Which of the pages that have left the window are shown again, oldest first."""
        ...

    def allocate(
        self, pictures: Sequence[ShownPicture], context: Sequence[Message], view: EpisodeView
    ) -> list[int]:
        """Pixels for each picture of an earlier turn, those shown again included; 0 = it is left out.

        The newest picture is none of them: it is always shown as its turn showed it. `context`: the messages
        around them, evidence as rendered.
        """
        ...

    def describe(self) -> dict:
        """Settings and decisions so far, for the trajectory's `meta`."""
        ...


class PassThrough:
    """The plain agent: the first page of the top k not yet shown, every thought in full."""

    name = "none"

    def pool_size(self, top_k: int) -> int:
        return top_k

    def select(self, query: str, candidates: Sequence[ScoredPage], view: EpisodeView) -> str | None:
        seen = set(view.shown_page_ids)
        return next((hit.page_id for hit in candidates if hit.page_id not in seen), None)

    def render(self, entry: EvidenceEntry, view: EpisodeView) -> list[str]:
        return entry.thoughts

    def represent(self, earlier: Sequence[ShownPicture], view: EpisodeView) -> list[ShownPicture]:
        return []

    def allocate(
        self, pictures: Sequence[ShownPicture], context: Sequence[Message], view: EpisodeView
    ) -> list[int]:
        return [picture.image.max_pixels for picture in pictures]

    def describe(self) -> dict:
        return {}
