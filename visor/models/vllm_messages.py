"""What goes over the wire between `RemoteEngine` and `visor vllm-serve`: JSON, with pictures as PNG."""

from __future__ import annotations

import base64
import io
from typing import Literal

from PIL import Image, UnidentifiedImageError
from pydantic import BaseModel, ConfigDict, Field

from visor.models.sampling_engine import EnginePrompt, EngineReply, EngineSampling

PNG_LEVEL = 1
"""Of zlib: pages are sent once and thrown away, so that time counts more than bytes."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptMessage(_Message):
    token_ids: list[int] = Field(min_length=1)
    images: list[str] = []
    """Base64 of PNG files, which keep every pixel."""

    def to_engine(self) -> EnginePrompt:
        return EnginePrompt(self.token_ids, [read_png(image) for image in self.images])


class SamplingMessage(_Message):
    max_tokens: int = Field(ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int = 0
    stop_ids: list[int] = []
    banned_ids: list[int] = []

    def to_engine(self) -> EngineSampling:
        return EngineSampling(**self.model_dump())


class GenerateRequest(_Message):
    prompt: PromptMessage
    sampling: SamplingMessage


class ReplyMessage(_Message):
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    prompt_ids: list[int]
    stamp: str
    """Of the weights it was sampled from."""

    @classmethod
    def of(cls, reply: EngineReply, stamp: str) -> ReplyMessage:
        return cls(**vars(reply), stamp=stamp)

    def to_engine(self) -> EngineReply:
        return EngineReply(**self.model_dump(exclude={"stamp"}))


class ScoreRequest(_Message):
    prompt: PromptMessage
    reply_ids: list[int] = Field(min_length=1)


class ScoreReply(_Message):
    logprobs: list[float]
    stamp: str


class Info(_Message):
    """`GET /v1/info`."""

    model: str
    fingerprint: str
    """Of the checkpoint the engine was started from."""
    max_context: int
    max_images: int
    vocab_size: int
    weights_version: int
    """How often weights were pushed since the start."""
    stamp: str
    """Names the weights that are sampled from now: the server's start and `weights_version`."""


def write_png(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=PNG_LEVEL)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def read_png(text: str) -> Image.Image:
    """ValueError for what is no PNG in base64."""
    try:
        image = Image.open(io.BytesIO(base64.b64decode(text, validate=True)), formats=["PNG"])
        image.load()
    except (ValueError, UnidentifiedImageError, OSError) as error:
        raise ValueError(f"an image of the prompt is no PNG in base64: {error}") from None
    return image.convert("RGB")
