"""A policy client on a vLLM engine in this process.

Written against `vllm.LLM.generate`. The tests put a stand-in with the same interface in its place; they show
what this module sends and reads, not how the engine behaves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from visor.models.base import ImageSource, Request
from visor.models.batching import Batcher
from visor.models.rendering import ChatRenderer, Encoded, check_fits, resize_image
from visor.stage_clock import CLOCK
from visor.types import Completion, FinishReason

DEFAULT_MAX_IMAGES = 16
MAX_PIXELS = 16384 * 784
BAN = -100.0


class VLLMClient:
    """Samples from the checkpoint at `path`; the weights stay as loaded.

    `max_context` is the engine's `max_model_len` (None: the checkpoint's own), `max_images` its limit of
    images a prompt; requests over either are refused before the engine sees them. `engine_args` are further
    arguments of `vllm.LLM`. Special ids other than the stop ids get a bias that keeps them from being
    sampled; recorded log-probabilities are the model's own, at temperature 1 and without that bias.
    """

    def __init__(
        self,
        path: str,
        renderer: ChatRenderer,
        images: ImageSource,
        *,
        max_context: int | None = None,
        max_images: int | None = None,
        batch_size: int = 256,
        name: str = "",
        engine_args: dict[str, Any] | None = None,
    ):
        try:
            import vllm
        except ImportError as error:
            raise ValueError("a vllm: model needs the vllm package; install visor-rag[vllm]") from error
        self._vllm, self.renderer, self.images = vllm, renderer, images
        self.name = name or path
        self._max_images = DEFAULT_MAX_IMAGES if max_images is None else max_images
        self._engine = vllm.LLM(
            model=path,
            max_model_len=max_context,
            limit_mm_per_prompt={"image": self._max_images},
            # Images arrive at their final size; the engine must not resize them again.
            mm_processor_kwargs={"min_pixels": 28 * 28, "max_pixels": MAX_PIXELS},
            logprobs_mode="raw_logprobs",
            **(engine_args or {}),
        )
        self._max_context = max_context or self._engine.llm_engine.model_config.max_model_len
        self._batcher = Batcher(self.serve, batch_size)

    async def complete(self, request: Request) -> Completion:
        """Sample one reply. Raises ContextTooLong, TooManyImages, ValueError for an image that cannot be
        shown, or what the image source raised, without harm to the other requests."""
        return await self._batcher.submit(request)

    def serve(self, requests: Sequence[Request]) -> list[Completion | Exception]:
        """Answer a batch, in order, with an exception in the place of a request that cannot be served."""
        started = time.perf_counter()
        results: list[Any] = []
        prompts, params, places = [], [], []
        for request in requests:
            try:
                with CLOCK.running("encode"):
                    encoded = self.renderer.encode(request.messages, self.images)
                    check_fits(encoded, request.sampling.max_tokens, self._max_context, self._max_images)
                    prompts.append(self._prompt(encoded))
            except Exception as error:  # a fault of this request alone, raised to its caller
                results.append(error)
                continue
            params.append(self._params(request))
            places.append(len(results))
            results.append(encoded)
        with CLOCK.running("decode"):
            outputs = self._engine.generate(prompts, params, use_tqdm=False) if prompts else []
        for place, output in zip(places, outputs, strict=True):
            results[place] = self._completion(results[place], output, time.perf_counter() - started)
        return results

    def _prompt(self, encoded: Encoded) -> dict[str, Any]:
        """vLLM expands one pad an image itself, so each run of pads is sent as a single one."""
        ids, cursor = [], 0
        for start, end in encoded.image_spans:
            ids += [*self._without_pads(encoded.input_ids[cursor:start]), self.renderer.image_token_id]
            cursor = end
        prompt: dict[str, Any] = {"prompt_token_ids": ids + self._without_pads(encoded.input_ids[cursor:])}
        if encoded.images:
            pictures = [
                resize_image(self.images(ref), size) for ref, size in zip(encoded.images, encoded.image_sizes)
            ]
            prompt["multi_modal_data"] = {"image": pictures}
        return prompt

    def _without_pads(self, ids: Sequence[int]) -> list[int]:
        """Pads that belong to no image, emitted by a policy, become padding."""
        return [self.renderer.pad_id if i == self.renderer.image_token_id else i for i in ids]

    def _params(self, request: Request):
        banned = self.renderer.special_ids - self.renderer.stop_ids
        return self._vllm.SamplingParams(
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            max_tokens=request.sampling.max_tokens,
            seed=request.seed,
            logprobs=0,
            stop_token_ids=sorted(self.renderer.stop_ids),
            logit_bias={i: BAN for i in sorted(banned)},
        )

    def _completion(self, encoded: Encoded, output, seconds: float) -> Completion:
        pads = sum(i == self.renderer.image_token_id for i in output.prompt_token_ids)
        expected = sum(end - start for start, end in encoded.image_spans)
        assert pads == expected, f"vLLM made {pads} image pads of {expected}; did it resize an image again?"
        reply = output.outputs[0]
        ids = list(reply.token_ids)
        return Completion(
            text=self.renderer.reply_text(ids),
            token_ids=ids,
            logprobs=[entry[i].logprob for entry, i in zip(reply.logprobs, ids, strict=True)],
            finish_reason=FinishReason.LENGTH if reply.finish_reason == "length" else FinishReason.STOP,
            prompt_token_ids=encoded.input_ids,
            image_sizes=encoded.image_sizes,
            seconds=seconds,
            model=self.name,
        )
