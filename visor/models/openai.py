"""A policy client on any OpenAI-compatible chat endpoint: text and tool calls, no ids, no logprobs."""

from __future__ import annotations

import asyncio
import base64
import io
import math
import os
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from visor.models.base import ContextTooLong, ImageSource, Request, ToolsNotSupported, TooManyImages
from visor.models.cache import LRUCache
from visor.models.openai_messages import Pictures, encodable, read_calls, sent_messages, sent_tool
from visor.models.rendering import resize_image, shown_size
from visor.models.smart_resize import FACTOR
from visor.types import Completion, FinishReason, ImageRef

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion
    from PIL.Image import Image

KEY_VARIABLE = "OPENAI_API_KEY"
JPEG_QUALITY = 95
SHRINK = 0.95
"""A picture over the byte limit is resized once, to this share of it by area (TAEC, appendix B)."""


class OpenAIClient:
    """Asks `model` at the endpoint `url` (up to and with `/v1`).

    Images are sent as JPEG at the size the pixel budget gives (`image_sizes` of the completion); one of more
    than `max_image_bytes` is made smaller once. Tools of a request are offered for native calls. The key is
    read from OPENAI_API_KEY; an endpoint that wants none gets a placeholder. Connection errors, time-outs and
    the statuses 408, 409, 429 and 5xx are tried again up to `max_retries` times with doubling waits; any
    other status is raised at once, as the exception of the `openai` package.
    """

    takes_tools = True

    def __init__(
        self,
        model: str,
        url: str,
        images: ImageSource,
        *,
        max_images: int | None = None,
        max_retries: int = 5,
        timeout: float = 600.0,
        cache_bytes: int = 1 << 28,
        jpeg_quality: int = JPEG_QUALITY,
        max_image_bytes: int | None = None,
    ):
        try:
            import openai
        except ImportError as error:
            raise ValueError(
                "an openai: model needs the openai package; install visor-rag[openai]"
            ) from error
        self.name = model
        self._openai = openai
        self._connections: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._images = images
        self._max_images = max_images
        self._jpeg_quality = jpeg_quality
        self._max_image_bytes = max_image_bytes
        self._settings = {
            "base_url": url,
            "api_key": os.environ.get(KEY_VARIABLE) or "none",
            "max_retries": max_retries,
            "timeout": timeout,
        }
        self._encoded: LRUCache[tuple[str, tuple[int, int]]] = LRUCache(
            cache_bytes, lambda pair: len(pair[0])
        )

    async def complete(self, request: Request) -> Completion:
        """Ask once. Raises TooManyImages, ContextTooLong and, for a request with tools, ToolsNotSupported
        where the limit here or the endpoint says so, and the `openai` package's exceptions for other refusals
        and for outages beyond the retries."""
        started = time.perf_counter()
        count = sum(len(message.images) for message in request.messages)
        if self._max_images is not None and count > self._max_images:
            raise TooManyImages(
                f"the prompt has {count} images; {self.name} is set to take {self._max_images}"
            )
        sampling = request.sampling
        pictures = Pictures(self._encode)
        messages = [sent for message in request.messages for sent in sent_messages(message, pictures)]
        tools = {"tools": [sent_tool(tool) for tool in request.tools]} if request.tools else {}
        try:
            response = await self._connection().chat.completions.create(
                model=self.name,
                messages=messages,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=sampling.max_tokens,
                seed=request.seed,
                **tools,
            )
        except self._openai.APIStatusError as error:
            meaning = _refusal(error, bool(tools))
            if meaning is None:
                raise
            raise meaning from error
        choice = response.choices[0]
        return Completion(
            text=encodable(choice.message.content or ""),
            finish_reason=FinishReason.LENGTH if choice.finish_reason == "length" else FinishReason.STOP,
            image_sizes=pictures.sizes,
            seconds=time.perf_counter() - started,
            model=self.name,
            tool_calls=read_calls(choice.message.tool_calls or []),
            image_bytes=pictures.bytes,
            prompt_tokens=_counted(response, "prompt_tokens"),
            completion_tokens=_counted(response, "completion_tokens"),
        )

    def _connection(self):
        """The client of the running event loop, to which its pool of connections belongs."""
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            self._connections[loop] = self._openai.AsyncOpenAI(**self._settings)
        return self._connections[loop]

    def _encode(self, ref: ImageRef) -> tuple[str, tuple[int, int]]:
        """The base64 JPEG of a picture and the (width, height) it is sent at; made once, then cached."""
        return self._encoded.get(ref.key, partial(self._jpeg, ref))

    def _jpeg(self, ref: ImageRef) -> tuple[str, tuple[int, int]]:
        image = self._images(ref)
        size = shown_size(ref, image.size)
        data = self._compressed(image, size)
        if self._max_image_bytes is not None and len(data) > self._max_image_bytes:
            scale = math.sqrt(SHRINK * self._max_image_bytes / len(data))
            size = _scaled(size[0], scale), _scaled(size[1], scale)
            data = self._compressed(image, size)
        return base64.b64encode(data).decode("ascii"), size

    def _compressed(self, image: Image, size: tuple[int, int]) -> bytes:
        buffer = io.BytesIO()
        resize_image(image, size).save(buffer, format="JPEG", quality=self._jpeg_quality)
        return buffer.getvalue()


def _counted(response: ChatCompletion, what: str) -> int | None:
    """A count of the reply's usage; None where the endpoint gives none, or no number."""
    count = getattr(getattr(response, "usage", None), what, None)
    return count if isinstance(count, int) and count >= 0 else None


def _scaled(side: int, scale: float) -> int:
    """A side made shorter, still a multiple of what the model's patches cover."""
    return max(FACTOR, int(side * scale) // FACTOR * FACTOR)


CONTEXT_PHRASES = (
    "context length",
    "context_length",
    "context window",
    "max_model_len",
    "prompt is too long",
)
IMAGE_PHRASES = ("image(s) may be provided", "too many images", "images are allowed", "number of images")


TOOL_PHRASES = ("tool", "function call")
TOOL_STATUSES = (400, 404, 405, 422, 501)


def _refusal(error: Any, with_tools: bool) -> Exception | None:
    """The refusal of a request as what it means for a trajectory; None when it means nothing special."""
    text = str(error).lower()
    if error.status_code == 400 and any(phrase in text for phrase in IMAGE_PHRASES):
        return TooManyImages(str(error))
    if error.status_code == 400 and any(phrase in text for phrase in CONTEXT_PHRASES):
        return ContextTooLong(str(error))
    if with_tools and error.status_code in TOOL_STATUSES and any(phrase in text for phrase in TOOL_PHRASES):
        return ToolsNotSupported(str(error))
    return None
