"""Pictures of earlier turns: at how many pixels a context shows them, as an evidence policy decides.

What the turns hold is never changed: a picture is shown smaller, or left out, in the context alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from visor.env.policy import EpisodeView, EvidencePolicy, ShownPicture
from visor.env.prompts import fill
from visor.env.window import first_in_window
from visor.types import ImagePart, ImageRef, Message, Part, Search, TextPart, Turn


def shown_pictures(turns: Sequence[Turn]) -> list[ShownPicture]:
    """Every picture that the turns have shown, in order."""
    pictures, searches = [], 0
    for turn in turns:
        searches += isinstance(turn.action, Search)
        if turn.observation is not None:
            images = turn.observation.message.images
            pictures += [ShownPicture(image, searches - 1, turn.index) for image in images]
    return pictures


def allocate_pictures(
    context: list[Message],
    window: int | None,
    n_turns: int,
    policy: EvidencePolicy,
    view: EpisodeView,
    heading: str,
) -> list[Message]:
    """The context with the pictures of earlier turns at the pixels that `policy` gives them.

    `context` ends with a reply and an observation for each turn in the window. Earlier pages that are shown
    again stand in one message before the window, each after `heading` (placeholder `{page_id}`). The newest
    picture in the window stays as it is.
    """
    first = first_in_window(n_turns, window)
    within = [picture for picture in view.pictures if picture.turn_index >= first]
    pages = {picture.image.page_id for picture in within}
    outside = [
        picture
        for picture in view.pictures
        if picture.turn_index < first and picture.image.box is None and picture.image.page_id not in pages
    ]
    again = policy.represent(outside, view)
    assert all(picture in outside for picture in again), f"{policy.name} shows again what has not left"
    retained = [*again, *within[:-1]]
    pixels = policy.allocate(retained, context, view)
    assert len(pixels) == len(retained), (
        f"{policy.name} gave {len(pixels)} budgets for {len(retained)} pictures"
    )
    by_turn = dict(zip((picture.turn_index for picture in within[:-1]), pixels[len(again) :]))
    head, tail = (
        context[: len(context) - 2 * (n_turns - first)],
        context[len(context) - 2 * (n_turns - first) :],
    )
    for position, turn_index in enumerate(range(first, n_turns)):
        if turn_index in by_turn:
            observation = 2 * position + 1
            tail[observation] = _resized(tail[observation], by_turn[turn_index])
    return [*head, *_shown_again(again, pixels, heading), *tail]


def at_most(image: ImageRef, pixels: int) -> ImageRef:
    """The picture at no more than `pixels`; the very same where that is no less than its own bound."""
    if pixels >= image.max_pixels:
        return image
    return image.model_copy(update={"max_pixels": pixels, "min_pixels": min(image.min_pixels, pixels)})


def _resized(message: Message, pixels: int) -> Message:
    content: list[Part] = []
    for part in message.content:
        if not isinstance(part, ImagePart):
            content.append(part)
        elif pixels:
            content.append(ImagePart(image=at_most(part.image, pixels)))
    return message.model_copy(update={"content": content})


def _shown_again(pictures: Sequence[ShownPicture], pixels: Sequence[int], heading: str) -> list[Message]:
    content: list[Part] = []
    for picture, budget in zip(pictures, pixels):
        if budget:
            label = fill(heading, page_id=picture.image.page_id)
            content += [TextPart(text=label)] if label else []
            content.append(ImagePart(image=at_most(picture.image, budget)))
    return [Message(role="user", content=content)] if content else []
