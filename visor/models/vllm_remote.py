"""A sampling engine behind HTTP: `visor vllm-serve`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import httpx2

from visor.models.cache import LRUCache
from visor.models.sampling_engine import EngineBusy, EngineFailed, EnginePrompt, EngineReply, EngineSampling
from visor.models.vllm_messages import (
    GenerateRequest,
    Info,
    PromptMessage,
    ReplyMessage,
    SamplingMessage,
    ScoreReply,
    ScoreRequest,
    write_png,
)

if TYPE_CHECKING:
    import torch

WAITS = (0.2, 0.5, 1.0, 2.0, 4.0)
"""Seconds before each further try when there is no connection, or it broke."""
PNG_CACHE_BYTES = 1 << 28
CONNECTION_ERRORS = (httpx2.NetworkError, httpx2.RemoteProtocolError, httpx2.ConnectTimeout)


class RemoteEngine:
    """The engine that `visor vllm-serve` hosts at `url`.

    The server must serve the checkpoint `model` with its own weights, or ValueError says what it serves
    instead; a trainer that pushes weights passes `own_weights=False` and is content with any weights of that
    checkpoint. `max_context` may bound requests further than the server does; `timeout` is in seconds, of one
    request. Every request is safe to repeat and is, a bounded number of times, when the connection fails.
    A server that was started again, or that got weights from elsewhere, is an EngineFailed: what it samples
    would not be what this run believes it is.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        max_context: int | None = None,
        timeout: float = 600.0,
        own_weights: bool = True,
        waits: Sequence[float] = WAITS,
    ):
        self.url, self.model = url.rstrip("/"), str(model)
        self._waits = waits
        self._settings: dict[str, Any] = {"timeout": httpx2.Timeout(timeout, pool=None), "trust_env": False}
        self._settings["limits"] = httpx2.Limits(max_connections=None)
        self._client = httpx2.Client(**self._settings)
        self._loops: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._pngs: LRUCache[str] = LRUCache(PNG_CACHE_BYTES, len)
        info = self.info()
        self._check_model(info, own_weights)
        self.max_context = min(max_context or info.max_context, info.max_context)
        self.max_images, self.vocab_size = info.max_images, info.vocab_size
        self._stamp = info.stamp

    # ------------------------------------------------------------ sampling

    async def generate(self, prompt: EnginePrompt, params: EngineSampling) -> EngineReply:
        sampling = SamplingMessage(**{name: _plain(value) for name, value in vars(params).items()})
        body = GenerateRequest(prompt=self._prompt(prompt), sampling=sampling).model_dump_json()
        reply = ReplyMessage.model_validate_json(await self._post("/v1/generate", body))
        self._check_stamp(reply.stamp)
        return reply.to_engine()

    def score(self, prompt: EnginePrompt, reply_ids: Sequence[int]) -> list[float]:
        if not reply_ids:
            return []
        body = ScoreRequest(prompt=self._prompt(prompt), reply_ids=list(reply_ids)).model_dump_json()
        reply = ScoreReply.model_validate_json(self._request("POST", "/v1/score", content=body))
        self._check_stamp(reply.stamp)
        return reply.logprobs

    def info(self) -> Info:
        """What the server says of itself."""
        return Info.model_validate_json(self._request("GET", "/v1/info"))

    # ------------------------------------------------------------ weights

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        from safetensors.torch import save

        from visor.models.weight_files import buckets

        push = _value(self._request("POST", "/v1/weights"), "push")
        count = 0
        for bucket in buckets(weights):
            self._request("PUT", f"/v1/weights/{push}/{count}", content=save(bucket))
            count += 1
        # From here on the stamp is the new one, whoever asks while this waits for the answer.
        self._stamp = _value(self._request("POST", f"/v1/weights/{push}/commit/{count}"), "stamp")

    @property
    def stamp(self) -> str:
        """Which start of the server and which weights this engine expects."""
        return self._stamp

    def expect(self, stamp: str) -> None:
        """Expect the weights that another process of the same run has pushed."""
        self._stamp = stamp

    def reset_caches(self) -> None:
        self._request("POST", "/v1/reset_caches")

    def close(self) -> None:
        """Close the connections; the server goes on."""
        self._client.close()

    # ------------------------------------------------------------ the connection

    def _request(self, method: str, path: str, content: bytes | str | None = None) -> bytes:
        for wait in (*self._waits, None):
            try:
                return self._checked(self._client.request(method, self.url + path, content=content))
            except CONNECTION_ERRORS as error:
                self._give_up(error, wait)
                time.sleep(wait or 0)
            except httpx2.HTTPError as error:
                raise self._gone(error) from error
        raise AssertionError("unreachable")

    async def _post(self, path: str, content: str) -> bytes:
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            self._loops[loop] = httpx2.AsyncClient(**self._settings)
        for wait in (*self._waits, None):
            try:
                return self._checked(await self._loops[loop].post(self.url + path, content=content))
            except CONNECTION_ERRORS as error:
                self._give_up(error, wait)
                await asyncio.sleep(wait or 0)
            except httpx2.HTTPError as error:
                raise self._gone(error) from error
        raise AssertionError("unreachable")

    def _give_up(self, error: Exception, wait: float | None) -> None:
        if wait is None:
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> EngineFailed:
        tries = len(self._waits) + 1
        what = f"after {tries} tries" if isinstance(error, CONNECTION_ERRORS) else "in time"
        return EngineFailed(
            f"the vLLM server at {self.url} does not answer {what}: {type(error).__name__}: {error}"
        )

    def _checked(self, response: httpx2.Response) -> bytes:
        if response.is_success:
            return response.content
        try:
            detail = str(response.json()["detail"])
        except (ValueError, KeyError, TypeError):
            detail = response.text[:300] or "no reason given"
        sentence = f"the vLLM server at {self.url} refused ({response.status_code}): {detail}"
        raise {422: ValueError, 413: ValueError, 423: EngineBusy}.get(response.status_code, EngineFailed)(
            sentence
        )

    # ------------------------------------------------------------ helpers

    def _prompt(self, prompt: EnginePrompt) -> PromptMessage:
        return PromptMessage(
            token_ids=list(prompt.token_ids), images=[self._png(image) for image in prompt.images]
        )

    def _png(self, image: Any) -> str:
        """Pages repeat over the turns and episodes of a run, and compressing takes longer than hashing."""
        key = image.size, hashlib.sha256(image.tobytes()).digest()
        return self._pngs.get(key, lambda: write_png(image))

    def _check_model(self, info: Info, own_weights: bool) -> None:
        from visor.models.weight_files import checkpoint_fingerprint

        if info.fingerprint != checkpoint_fingerprint(self.model):
            raise ValueError(
                f"the vLLM server at {self.url} serves {info.model}, which is not the checkpoint {self.model}"
            )
        if own_weights and info.weights_version:
            raise ValueError(
                f"weights were pushed into the vLLM server at {self.url} {info.weights_version} times, so "
                f"it no longer serves {self.model}; start it again"
            )

    def _check_stamp(self, stamp: str) -> None:
        if stamp != self._stamp:
            raise EngineFailed(
                f"the vLLM server at {self.url} was started again or got weights from elsewhere "
                f"(it has {stamp}, this run expects {self._stamp})"
            )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, Sequence) else value


def _value(content: bytes, field: str) -> str:
    return json.loads(content)[field]
