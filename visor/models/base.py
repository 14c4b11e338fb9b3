"""What a policy client is: messages in, one completion out, with its own seed for each request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

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
class Tool:
    """A function that a model may call."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON Schema of its arguments, an object."""


@dataclass(frozen=True)
class Request:
    """One policy call."""

    messages: list[Message]
    seed: int
    """Fixes the random numbers of this request, whatever else is in the batch."""
    sampling: Sampling = field(default_factory=Sampling)
    tools: Sequence[Tool] = ()
    """Offered for native calls, which only a client with `takes_tools` makes."""
    must_call: bool = False
    """The reply has to call one of the tools (`tool_choice: required`)."""
    opens: bool | None = None
    """Whether it is the first of its question; None = it is when no reply stands in it."""


class ContextTooLong(ValueError):
    """The prompt and its reply do not fit the model; the trajectory ends with stop reason `length`."""


class TooManyImages(ValueError):
    """The prompt has more images than the engine takes; the trajectory ends with `image_limit`."""


class ToolsNotSupported(ValueError):
    """The endpoint refuses requests with tools; the same question can be asked in text."""


def takes_tools(client: PolicyClient) -> bool:
    """Whether a client passes `Request.tools` on and reads native calls: its `takes_tools`, if it has one."""
    return bool(getattr(client, "takes_tools", False))


class PolicyClient(Protocol):
    """Anything that answers requests. `name` is recorded with every completion."""

    name: str

    async def complete(self, request: Request) -> Completion:
        """Answer one request. Raises ContextTooLong or TooManyImages for a request that cannot be served,
        any other exception for a fault of the client. Calls made concurrently may be served as one batch."""
        ...
