"""A policy client on any OpenAI-compatible chat endpoint: text and tool calls, no ids, no logprobs."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import os
import time
import weakref
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from visor.models.base import ContextTooLong, ImageSource, Request, ToolsNotSupported, TooManyImages
from visor.models.cache import LRUCache
from visor.models.openai_messages import Pictures, encodable, read_calls, sent_messages, sent_tool
from visor.models.rendering import resize_image, shown_size
from visor.models.smart_resize import FACTOR
from visor.types import Completion, FinishReason, ImageRef

if TYPE_CHECKING:
    from PIL.Image import Image

KEY_VARIABLE = "OPENAI_API_KEY"
JPEG_QUALITY = 95
MALFORMED_RETRIES = 2
MALFORMED_WAIT = 0.5
"""Seconds before a malformed reply is asked for again; doubled each time."""
SHRINK = 0.95
"""A picture over the byte limit is resized once, to this share of it by area (TAEC, appendix B)."""


class MalformedReply(Exception):
    """An endpoint answered, with status 200, with something that is no chat completion."""


class OpenAIClient:
    """Asks `model` at the endpoint `url` (up to and with `/v1`).

    Images are sent as JPEG at the size the pixel budget gives (`image_sizes` of the completion); one of more
    than `max_image_bytes` is made smaller once. Tools of a request are offered for native calls. The key is
    read from OPENAI_API_KEY; an endpoint that wants none gets a placeholder. Connection errors, time-outs and
    the statuses 408, 409, 429 and 5xx are tried again up to `max_retries` times with doubling waits, a reply
    that is no chat completion at most MALFORMED_RETRIES times; any other status is raised at once, as the
    exception of the `openai` package. Errors of the connection name the address.
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
        self._url = url
        self._openai = openai
        self._connections: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._images = images
        self._max_images = max_images
        self._jpeg_quality = jpeg_quality
        self._max_image_bytes = max_image_bytes
        self._malformed_retries = min(MALFORMED_RETRIES, max_retries)
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
        where the limit here or the endpoint says so, and beyond the retries MalformedReply for what is no
        chat completion and the `openai` package's exceptions for outages and other refusals."""
        started = time.perf_counter()
        images = sum(len(message.images) for message in request.messages)
        if self._max_images is not None and images > self._max_images:
            raise TooManyImages(
                f"the prompt has {images} images; {self.name} is set to take {self._max_images}"
            )
        sampling = request.sampling
        pictures = Pictures(self._encode)
        messages = [sent for message in request.messages for sent in sent_messages(message, pictures)]
        tools: dict[str, Any] = {"tools": list(map(sent_tool, request.tools))} if request.tools else {}
        if request.tools and request.must_call:
            tools["tool_choice"] = "required"
        # In extra_body, which is sent as it is: the package would otherwise walk through every part of every
        # message, which takes milliseconds of each call and holds up the calls of all other questions.
        response, choice = await self._choice(
            model=self.name,
            messages=[],
            extra_body={"messages": messages, **tools},
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            seed=request.seed,
        )
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

    async def _choice(self, **arguments: Any) -> tuple[Any, Any]:
        """The reply to a request and its first choice; one that is malformed is asked for again."""
        for attempt in count():
            try:
                response = await self._connection().chat.completions.create(**arguments)
                return response, _first_choice(response, self.name)
            except self._openai.APIConnectionError as error:
                _name_endpoint(error, self._url)
                raise
            except self._openai.APIStatusError as error:
                meaning = _refusal(error, "tools" in arguments["extra_body"])
                if meaning is None:
                    raise
                raise meaning from error
            except (MalformedReply, json.JSONDecodeError, UnicodeDecodeError) as error:
                if attempt >= self._malformed_retries:
                    if isinstance(error, MalformedReply):
                        raise
                    raise MalformedReply(
                        f"{self.name} answered with something that is no JSON: {error}"
                    ) from error
            await asyncio.sleep(MALFORMED_WAIT * 2**attempt)
        raise AssertionError("unreachable")

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


def _name_endpoint(error: Any, url: str) -> None:
    """Add to a connection error the address and what the system said of it; its type stays."""
    parts = urlsplit(url)
    address = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    cause = str(error.__cause__ or "")
    error.message = f"{error.message.rstrip('.')} at {address}{f' ({cause})' if cause else ''}"
    error.args = (error.message,)


def is_unreachable(error: BaseException) -> bool:
    """Whether a call failed because there was no connection to the endpoint at all, rather than one that
    broke or took too long."""
    cause = error.__cause__
    return type(error).__name__ == "APIConnectionError" and type(cause).__name__ == "ConnectError"


def _counted(response: Any, what: str) -> int | None:
    """A count of the reply's usage; None where the endpoint gives none, or no number."""
    count = getattr(getattr(response, "usage", None), what, None)
    return count if isinstance(count, int) and count >= 0 else None


def _first_choice(response: Any, name: str) -> Any:
    """The first choice of a reply; MalformedReply for one that is no chat completion, which the `openai`
    package passes on unchecked."""
    choices = getattr(response, "choices", None)
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = getattr(choice, "message", None)
    if message is None or not isinstance(getattr(message, "content", None), str | None):
        raise MalformedReply(f"{name} answered with something that is no chat completion: {response!r:.200}")
    return choice


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
