"""What a sampling engine is: token ids and pictures in, sampled ids and their log-probabilities out.

An engine knows no messages and no tokenizer. `LocalEngine` is vLLM in this process, `RemoteEngine` one behind
HTTP; `VLLMClient` is the policy client on either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


@dataclass(frozen=True)
class EnginePrompt:
    """A prompt as the engine takes it."""

    token_ids: Sequence[int]
    """One image pad for each image; the engine makes of it as many as the image has features."""
    images: Sequence[Image] = ()
    """RGB, in order of their pads, at the size the model sees them: sides are multiples of 28 pixels."""


@dataclass(frozen=True)
class EngineSampling:
    """How one reply is sampled."""

    max_tokens: int
    temperature: float = 1.0
    """0 = greedy."""
    top_p: float = 1.0
    seed: int = 0
    """Fixes the random numbers of this request, whatever else runs."""
    stop_ids: Sequence[int] = ()
    """The only ids that end a reply; the one that did is its last id."""
    banned_ids: Sequence[int] = ()
    """Ids that are never sampled."""


@dataclass(frozen=True)
class EngineReply:
    """One sampled reply of T tokens."""

    token_ids: list[int]
    """(T,)"""
    logprobs: list[float]
    """(T,) of the model itself: at temperature 1, nothing banned."""
    finish_reason: Literal["stop", "length"]
    prompt_ids: list[int] = field(default_factory=list)
    """The prompt as the model read it, image pads expanded."""


class EngineFailed(RuntimeError):
    """The engine is gone: it died, was closed, or does not answer. Nothing more comes from it."""


class EngineBusy(RuntimeError):
    """Weights were to be loaded while requests run."""


class SamplingEngine(Protocol):
    """Samples replies and takes new weights."""

    model: str
    """The checkpoint it was started from."""
    max_context: int
    """Most tokens of prompt and reply together."""
    max_images: int
    """Most images of a prompt."""
    vocab_size: int
    """Number of logits; may be more than the tokenizer has ids."""

    async def generate(self, prompt: EnginePrompt, params: EngineSampling) -> EngineReply:
        """Sample one reply. Any number of calls may wait at once; each ends on its own. Raises ValueError
        for a prompt the engine refuses, EngineFailed when there is no engine any more."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights, named as in the state dict of `Qwen2_5_VLForConditionalGeneration`, vision
        included; of tied embeddings one name is enough. Drops every cache. Raises EngineBusy while requests
        run, and ValueError for a name too few or too many, or a wrong shape. A list is checked before
        anything changes; an iterator that turns out wrong on the way leaves an engine that samples no
        more."""
        ...

    def reset_caches(self) -> None:
        """Forget what was computed with other weights: prefixes, processed images and image features."""
        ...

    def score(self, prompt: EnginePrompt, reply_ids: Sequence[int]) -> list[float]:
        """(T,) log-probability of each id of a reply under the present weights, at temperature 1."""
        ...

    def close(self) -> None:
        """End the engine; requests that wait get EngineFailed."""
        ...
