"""The policy client on a sampling engine: vLLM in this process or behind HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from visor.models.base import ImageSource, Request
from visor.models.cache import LRUCache
from visor.models.rendering import ChatRenderer, Encoded, check_fits, resize_image
from visor.models.sampling_engine import EnginePrompt, EngineReply, EngineSampling, SamplingEngine
from visor.stage_clock import CLOCK
from visor.types import Completion, FinishReason, ImageRef

if TYPE_CHECKING:
    from PIL.Image import Image


class VLLMClient:
    """Samples from `engine`, whose weights another may replace.

    Every request goes to the engine as soon as it is rendered and comes back when its own reply has ended.
    Requests over the engine's `max_context` or over `max_images` (None: the engine's) are refused before the
    engine sees them. Never sampled: every special id except the stop ids, and ids that the tokenizer does not
    have. Recorded log-probabilities are the model's own, at temperature 1 and without that ban.
    `policy_version` is copied into each completion.
    """

    def __init__(
        self,
        engine: SamplingEngine,
        renderer: ChatRenderer,
        images: ImageSource,
        *,
        max_images: int | None = None,
        name: str = "",
        policy_version: int = 0,
        picture_cache_bytes: int = 1 << 29,
    ):
        self.engine, self.renderer, self.images = engine, renderer, images
        self.name = name or engine.model
        self.policy_version = policy_version
        self._max_images = engine.max_images if max_images is None else min(max_images, engine.max_images)
        known = max(renderer.tokenizer.get_vocab().values()) + 1
        self._banned = frozenset(renderer.special_ids - renderer.stop_ids) | set(
            range(known, engine.vocab_size)
        )
        self._ban = sorted(self._banned)
        self._stop = sorted(renderer.stop_ids)
        self._pictures: LRUCache[Image] = LRUCache(picture_cache_bytes, lambda p: 3 * p.width * p.height)
        self._encoder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode")

    async def complete(self, request: Request) -> Completion:
        """Sample one reply. Raises ContextTooLong, TooManyImages, ValueError for an image that cannot be
        shown, what the image source raised, or EngineFailed."""
        started = time.perf_counter()
        loop = asyncio.get_running_loop()
        encoded, prompt = await loop.run_in_executor(self._encoder, self._encode, request)
        version = self.policy_version
        with CLOCK.waiting("decode"):
            reply = await self.engine.generate(prompt, self._sampling(request))
        self._check(encoded, prompt, reply)
        return Completion(
            text=self.renderer.reply_text(reply.token_ids),
            token_ids=reply.token_ids,
            logprobs=reply.logprobs,
            finish_reason=FinishReason.LENGTH if reply.finish_reason == "length" else FinishReason.STOP,
            prompt_token_ids=encoded.input_ids,
            image_sizes=encoded.image_sizes,
            seconds=time.perf_counter() - started,
            model=self.name,
            policy_version=version,
        )

    def score(self, encoded: Encoded, reply_ids: Sequence[int]) -> list[float]:
        """(T,) log-probability of each id of a reply to a rendered prompt under the engine's weights."""
        return self.engine.score(self.prompt(encoded), reply_ids)

    def prompt(self, encoded: Encoded) -> EnginePrompt:
        """A rendered prompt as the engine takes it: each image's run of pads as a single one, its picture at
        the size it is shown at. Pads that belong to no image, emitted by a policy, become padding."""
        ids, cursor = [], 0
        for start, end in encoded.image_spans:
            ids += [*self._without_pads(encoded.input_ids[cursor:start]), self.renderer.image_token_id]
            cursor = end
        ids += self._without_pads(encoded.input_ids[cursor:])
        return EnginePrompt(
            ids, [self._picture(*shown) for shown in zip(encoded.images, encoded.image_sizes)]
        )

    def _picture(self, ref: ImageRef, size: tuple[int, int]) -> Image:
        """A page resized; pages repeat over turns and episodes, so it is made once and kept."""
        return self._pictures.get(ref.key, lambda: resize_image(self.images(ref), size))

    def _encode(self, request: Request) -> tuple[Encoded, EnginePrompt]:
        with CLOCK.running("encode"):
            encoded = self.renderer.encode(request.messages, self.images)
            check_fits(encoded, request.sampling.max_tokens, self.engine.max_context, self._max_images)
            return encoded, self.prompt(encoded)

    def _without_pads(self, ids: Sequence[int]) -> list[int]:
        return [self.renderer.pad_id if i == self.renderer.image_token_id else i for i in ids]

    def _sampling(self, request: Request) -> EngineSampling:
        return EngineSampling(
            max_tokens=request.sampling.max_tokens,
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            seed=request.seed,
            stop_ids=self._stop,
            banned_ids=self._ban,
        )

    def _check(self, encoded: Encoded, prompt: EnginePrompt, reply: EngineReply) -> None:
        """The engine read the prompt as it was rendered, and sampled nothing that is banned."""
        pads = sum(i == self.renderer.image_token_id for i in reply.prompt_ids)
        expected = sum(end - start for start, end in encoded.image_spans)
        assert pads == expected, f"vLLM made {pads} image pads of {expected}; did it resize an image again?"
        length = len(prompt.token_ids) + expected - len(prompt.images)
        assert len(reply.prompt_ids) == length, f"vLLM read {len(reply.prompt_ids)} prompt tokens of {length}"
        assert self._banned.isdisjoint(reply.token_ids), "vLLM sampled a banned id"
