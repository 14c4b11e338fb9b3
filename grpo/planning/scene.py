"""What a run's episodes are made of, as far as lengths go: questions, page ids and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from grpo.planning.pictures import (
    Size,
    crop_budget,
    fullest_page,
    fullest_picture,
    is_showable,
    page_budget,
)
from visor.env.config import EpisodeConfig
from visor.models.rendering import ChatRenderer
from visor.types import ImageRef, Page, Question

ASSUMED_QUESTION = (
    "How many of the vessels named in the annual report were built before 1990 and are still in use ?"
)
ASSUMED_PAGE_ID = "some-annual-report#page=100"


@dataclass(frozen=True)
class Scene:
    """The material of one episode."""

    question: str
    page_ids: Sequence[str]
    """In the order in which searches find them."""
    page: Size
    """Size of every page, pixels."""
    crop: Size
    """Size of every crop as it is cut, pixels."""

    def picture(self, ref: ImageRef):
        """An `ImageSource` for counting: only the size of the picture is there."""
        return SimpleNamespace(size=self.page if ref.box is None else self.crop)


@dataclass
class Material:
    """The scenes of the longest and of the typical episode, and what is known of the pictures."""

    worst: Scene
    typical: Scene
    assumed: list[str] = field(default_factory=list)
    """What is not known and was assumed, in words."""
    unshowable: list[str] = field(default_factory=list)
    """Pages longer than 200:1, which no budget can show."""
    over_budget: list[str] = field(default_factory=list)
    """Pages that take more image tokens than the budget means, because both sides are rounded."""


def gather(
    renderer: ChatRenderer,
    episode: EpisodeConfig,
    pages: Sequence[Page] | None,
    questions: Sequence[Question] | None,
) -> Material:
    """The material of a run. None: it is not there yet, and something usual is assumed in its place."""
    material = _pages(renderer, episode, pages)
    texts = sorted((q.text for q in questions or []), key=lambda text: len(renderer.text_ids(text)))
    if not texts:
        material.assumed.append(f"questions like {ASSUMED_QUESTION!r}, because their file is not there")
        texts = [ASSUMED_QUESTION]
    return Material(
        _asking(material.worst, texts[-1]),
        _asking(material.typical, texts[len(texts) // 2]),
        material.assumed,
        material.unshowable,
        material.over_budget,
    )


def _asking(scene: Scene, question: str) -> Scene:
    return Scene(question, scene.page_ids, scene.page, scene.crop)


def _pages(renderer: ChatRenderer, episode: EpisodeConfig, pages: Sequence[Page] | None) -> Material:
    factor = renderer.patch_size * renderer.merge_size
    page, crop = page_budget(episode, factor), crop_budget(episode, factor)
    wanted = episode.max_turns
    if not pages:
        ids = [ASSUMED_PAGE_ID.replace("100", str(100 + i)) for i in range(wanted)]
        scene = Scene("", ids, fullest_picture(page), fullest_picture(crop))
        return Material(scene, scene, ["pages of any shape, because the corpus is not there"])
    showable = [p for p in pages if is_showable((p.width, p.height))]
    if not showable:
        raise ValueError(f"none of the {len(pages)} pages can be shown: all are longer than 200:1")
    sizes = [(p.width, p.height) for p in showable]
    by_length = sorted(showable, key=lambda p: len(renderer.text_ids(p.page_id)), reverse=True)
    sides = max(width for width, _ in sizes), max(height for _, height in sizes)
    largest_crop = fullest_picture(crop, sides)
    by_tokens = sorted(sizes, key=page.tokens)
    middle = len(by_length) // 2
    return Material(
        Scene("", _ids(by_length, wanted), fullest_page(sizes, page), largest_crop),
        Scene("", _ids(by_length[middle:], wanted), by_tokens[len(by_tokens) // 2], largest_crop),
        unshowable=[p.page_id for p in pages if not is_showable((p.width, p.height))],
        over_budget=[p.page_id for p in showable if page.tokens((p.width, p.height)) > page.token_range[1]],
    )


def _ids(pages: Sequence[Page], wanted: int) -> list[str]:
    """As many page ids as an episode can be shown, though the corpus may hold fewer."""
    ids = [page.page_id for page in pages[:wanted]]
    return ids + [f"{ids[0]}{i}" for i in range(wanted - len(ids))]
