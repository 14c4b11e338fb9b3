"""A policy client on any OpenAI-compatible chat endpoint, which gives text only: no ids, no logprobs."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import time
import weakref
from functools import partial
from typing import Any

from visor.models.base import ContextTooLong, ImageSource, Request, TooManyImages
from visor.models.cache import LRUCache
from visor.models.rendering import resize_image, shown_size
from visor.types import Completion, FinishReason, ImagePart, ImageRef, Message

KEY_VARIABLE = "OPENAI_API_KEY"
JPEG_QUALITY = 95


class OpenAIClient:
    """Asks `model` at the endpoint `url` (up to and with `/v1`).

    Images are sent as JPEG at the size the pixel budget gives (`image_sizes` of the completion). The key is
    read from OPENAI_API_KEY; an endpoint that wants none gets a placeholder. Connection errors, time-outs and
    the statuses 408, 409, 429 and 5xx are tried again up to `max_retries` times with doubling waits; any
    other status is raised at once, as the exception of the `openai` package.
    """

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
        """Ask once. Raises TooManyImages and ContextTooLong where the limit here or the endpoint says so, and
        the `openai` package's exceptions for other refusals and for outages beyond the retries."""
        started = time.perf_counter()
        count = sum(len(message.images) for message in request.messages)
        if self._max_images is not None and count > self._max_images:
            raise TooManyImages(
                f"the prompt has {count} images; {self.name} is set to take {self._max_images}"
            )
        sampling = request.sampling
        sizes: list[tuple[int, int]] = []
        messages = [self._message(message, sizes) for message in request.messages]
        try:
            response = await self._connection().chat.completions.create(
                model=self.name,
                messages=messages,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=sampling.max_tokens,
                seed=request.seed,
            )
        except self._openai.BadRequestError as error:
            raise _refusal(error) from error
        choice = response.choices[0]
        return Completion(
            text=_encodable(choice.message.content or ""),
            finish_reason=FinishReason.LENGTH if choice.finish_reason == "length" else FinishReason.STOP,
            image_sizes=sizes,
            seconds=time.perf_counter() - started,
            model=self.name,
        )

    def _connection(self):
        """The client of the running event loop, to which its pool of connections belongs."""
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            self._connections[loop] = self._openai.AsyncOpenAI(**self._settings)
        return self._connections[loop]

    def _message(self, message: Message, sizes: list[tuple[int, int]]) -> dict[str, Any]:
        if not message.images:
            return {"role": message.role, "content": message.text}
        content: list[dict[str, Any]] = []
        for part in message.content:
            if isinstance(part, ImagePart):
                url, size = self._encoded.get(part.image.key, partial(self._data_url, part.image))
                sizes.append(size)
                content.append({"type": "image_url", "image_url": {"url": url}})
            else:
                content.append({"type": "text", "text": part.text})
        return {"role": message.role, "content": content}

    def _data_url(self, ref: ImageRef) -> tuple[str, tuple[int, int]]:
        image = self._images(ref)
        size = shown_size(ref, image.size)
        buffer = io.BytesIO()
        resize_image(image, size).save(buffer, format="JPEG", quality=JPEG_QUALITY)
        return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii"), size


def _encodable(text: str) -> str:
    """Lone surrogates, which JSON can carry and UTF-8 cannot, become "?": replies are stored and sent."""
    return text.encode("utf-8", "replace").decode("utf-8")


CONTEXT_PHRASES = (
    "context length",
    "context_length",
    "context window",
    "max_model_len",
    "prompt is too long",
)
IMAGE_PHRASES = ("image(s) may be provided", "too many images", "images are allowed", "number of images")


def _refusal(error: Exception) -> Exception:
    """The refusal of a request (status 400) as what it means for a trajectory; other refusals as they are."""
    text = str(error).lower()
    if any(phrase in text for phrase in IMAGE_PHRASES):
        return TooManyImages(str(error))
    if any(phrase in text for phrase in CONTEXT_PHRASES):
        return ContextTooLong(str(error))
    return error
