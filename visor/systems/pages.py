"""Pages as pictures in a message, at the budgets of a system."""

from __future__ import annotations

from collections.abc import Sequence

from visor.env.retained import at_most
from visor.systems.config import TOKEN_AREA, LoopConfig
from visor.types import ImagePart, ImageRef, Message, Part, TextPart


def page_reference(page_id: str, config: LoopConfig, max_pixels: int | None = None) -> ImageRef:
    """A page at the budget of a fresh one, or at one of its own."""
    high = config.page_max_pixels if max_pixels is None else max_pixels
    return ImageRef(page_id=page_id, min_pixels=min(config.page_min_pixels, high), max_pixels=high)


def labelled(label: str, picture: ImageRef) -> list[Part]:
    """A picture with the text that stands before it, if any."""
    text: list[Part] = [TextPart(text=label)] if label else []
    return [*text, ImagePart(image=picture)]


def with_visual_budget(messages: Sequence[Message], budget: int) -> list[Message]:
    """The messages with each of their n pictures at no more than budget / n pixels; 0 = as they are.

    The uniform split of TAEC's ReAct baseline (appendix A.8), made anew at every call. A picture keeps at
    least one image token.
    """
    count = sum(len(message.images) for message in messages)
    if not budget or not count:
        return list(messages)
    limit = max(budget // count, TOKEN_AREA)
    return [_limited(message, limit) if message.images else message for message in messages]


def _limited(message: Message, limit: int) -> Message:
    content = [
        ImagePart(image=at_most(part.image, limit)) if isinstance(part, ImagePart) else part
        for part in message.content
    ]
    return message.model_copy(update={"content": content})
