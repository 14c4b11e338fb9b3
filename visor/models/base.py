"""What a policy client is: messages in, one completion out, with its own seed for each request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from visor.types import Completion, ImageRef, Message

if TYPE_CHECKING:
    from PIL.Image import Image

ImageSource = Callable[[ImageRef], "Image"]
"""Gives the picture of a reference, RGB, cut from the stored page but not yet resized to its budget."""


@dataclass(frozen=True)
class Sampling:
    """How a completion is sampled, under the field's names."""

    temperature: float = 1.0
    """0 = greedy."""
    top_p: float = 1.0
    max_tokens: int = 2048


@dataclass(frozen=True)
class Request:
    """One policy call."""

    messages: list[Message]
    seed: int
    """Fixes the random numbers of this request, whatever else is in the batch."""
    sampling: Sampling = field(default_factory=Sampling)


class ContextTooLong(ValueError):
    """The prompt and its reply do not fit the model; the trajectory ends with stop reason `length`."""


class TooManyImages(ValueError):
    """The prompt has more images than the engine takes; the trajectory ends with `image_limit`."""


class PolicyClient(Protocol):
    """Anything that answers requests. `name` is recorded with every completion."""

    name: str

    async def complete(self, request: Request) -> Completion:
        """Answer one request. Raises ContextTooLong or TooManyImages for a request that cannot be served,
        any other exception for a fault of the client. Calls made concurrently may be served as one batch."""
        ...
