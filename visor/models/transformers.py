"""A policy client on a Transformers model in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from visor.models.base import ImageSource, Request
from visor.models.batching import Batcher
from visor.models.decoding import Sampled, decode, inference
from visor.models.features import ImageFeatures
from visor.models.loading import unwrap
from visor.models.rendering import ChatRenderer, Encoded, check_fits
from visor.models.sampling import Sampler
from visor.models.tensors import collate, to_device
from visor.stage_clock import CLOCK
from visor.types import Completion, FinishReason


class TransformersClient:
    """Samples from `model`, whose weights are read at each call: an update is visible at once.

    Requests waiting at the same time are decoded as one batch of up to `batch_size`. `max_context` bounds the
    tokens of prompt and reply, `max_images` the images of a prompt (None = no limit). Never sampled: every
    special id except the end of a turn or text, and ids the tokenizer does not have. `logprobs` of a
    completion are those of the model at temperature 1 without that ban, as `forward_logprobs` gives them.

    Image features are kept between calls while the vision tower and the projector are frozen, or when
    `keep_features` is true; call `clear_cache` after loading other vision weights. `policy_version` is copied
    into each completion. `bf16` computes in bfloat16 over weights of another type, as mixed precision does.
    """

    def __init__(
        self,
        model,
        renderer: ChatRenderer,
        images: ImageSource,
        *,
        max_context: int | None = None,
        max_images: int | None = None,
        batch_size: int = 64,
        name: str = "transformers",
        policy_version: int = 0,
        keep_features: bool | None = None,
        feature_cache_bytes: int = 1 << 30,
        bf16: bool = False,
    ):
        self.features = ImageFeatures(
            model, renderer, images, keep=keep_features, cache_bytes=feature_cache_bytes
        )
        self.model, self.renderer, self.images = model, renderer, images
        self.max_context, self.max_images = max_context, max_images
        self.name, self.policy_version = name, policy_version
        self.bf16 = bf16
        self._batcher = Batcher(self.serve, batch_size)
        self._banned = banned_ids(unwrap(model).lm_head.out_features, renderer)

    async def complete(self, request: Request) -> Completion:
        """Sample one reply. Raises ContextTooLong, TooManyImages, ValueError for an image that cannot be
        shown, or what the image source raised, without harm to the other requests of the batch."""
        return await self._batcher.submit(request)

    def clear_cache(self) -> None:
        """Forget kept image features."""
        self.features.clear()

    def serve(self, requests: Sequence[Request]) -> list[Completion | Exception]:
        """Answer a batch, in order, with an exception in the place of a request that cannot be served."""
        started = time.perf_counter()
        with CLOCK.running("encode"):
            encoded = [self._encode(request) for request in requests]
        good = {i: prompt for i, prompt in enumerate(encoded) if isinstance(prompt, Encoded)}
        served: dict[int, Completion] = {}
        if good:
            replies = self._decode(list(good.values()), [requests[i] for i in good])
            seconds = time.perf_counter() - started
            for (i, prompt), reply in zip(good.items(), replies):
                served[i] = self._completion(prompt, reply, seconds)
        return [served[i] if isinstance(item, Encoded) else item for i, item in enumerate(encoded)]

    def _encode(self, request: Request) -> Encoded | Exception:
        try:
            encoded = self.renderer.encode(request.messages, self.images)
            check_fits(encoded, request.sampling.max_tokens, self.max_context, self.max_images)
        except Exception as error:  # a fault of this request alone, raised to its caller
            return error
        return encoded

    def _decode(self, prompts: list[Encoded], requests: list[Request]) -> list[Sampled]:
        device = next(self.model.parameters()).device
        distinct: dict[tuple, int] = {}
        for prompt in prompts:
            distinct.setdefault(_identity(prompt), len(distinct))
        prompt_of = [distinct[_identity(prompt)] for prompt in prompts]
        unique = [prompts[prompt_of.index(u)] for u in range(len(distinct))]
        with inference(self.model), torch.autocast(device.type, torch.bfloat16, enabled=self.bf16):
            with CLOCK.running("encode"):
                batch = collate(unique, self.renderer, self.images, padding="left", pixels=False)
                features = self.features([ref for prompt in unique for ref in prompt.images])
            with CLOCK.running("decode"):
                return decode(
                    self.model,
                    to_device(batch, device),
                    features,
                    prompt_of,
                    [request.sampling.max_tokens for request in requests],
                    Sampler(requests, self._banned.to(device)),
                    self.renderer.stop_ids,
                )

    def _completion(self, prompt: Encoded, reply: Sampled, seconds: float) -> Completion:
        return Completion(
            text=self.renderer.reply_text(reply.token_ids),
            token_ids=reply.token_ids,
            logprobs=reply.logprobs,
            finish_reason=FinishReason.STOP if reply.stopped else FinishReason.LENGTH,
            prompt_token_ids=prompt.input_ids,
            image_sizes=prompt.image_sizes,
            seconds=seconds,
            model=self.name,
            policy_version=self.policy_version,
        )


def banned_ids(vocabulary: int, renderer: ChatRenderer) -> torch.Tensor:
    """(vocabulary,) bool: the special ids except the stop ids, and the ids beyond the tokenizer."""
    banned = torch.zeros(vocabulary, dtype=torch.bool)
    banned[list(renderer.special_ids - renderer.stop_ids)] = True
    banned[max(renderer.tokenizer.get_vocab().values()) + 1 :] = True
    return banned


def _identity(prompt: Encoded) -> tuple:
    return tuple(prompt.input_ids), tuple(ref.key for ref in prompt.images)
