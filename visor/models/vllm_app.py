"""The HTTP endpoints over a sampling engine. docs/vllm.md describes them."""

from __future__ import annotations

import asyncio
import json
import shutil
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response
from pydantic import ValidationError
from safetensors import SafetensorError

from visor.models.sampling_engine import EngineBusy, EngineFailed, SamplingEngine
from visor.models.vllm_messages import GenerateRequest, Info, ReplyMessage, ScoreReply, ScoreRequest
from visor.models.weight_files import WeightFiles

MAX_BODY_BYTES = 1 << 28
MAX_BUCKET_BYTES = 1 << 34
T = TypeVar("T")


class Refused(Exception):
    """An HTTP status and a sentence that says why."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status = status


class Weights:
    """Which weights the engine has, and the push of new ones that is under way.

    `stamp` names them: the engine's start and the number of pushes since. A push is staged as files and
    reaches the engine as a whole, so that nothing is ever sampled from a part of it.
    """

    def __init__(self, engine: SamplingEngine, folder: Path):
        self._engine, self._folder = engine, folder
        self._start, self.version = uuid.uuid4().hex[:12], 0
        self._push, self._committed = "", ""
        self.lock = asyncio.Lock()

    @property
    def stamp(self) -> str:
        return f"{self._start}:{self.version}"

    def begin(self) -> str:
        """Start a push; one that was not committed is dropped."""
        if self._push:
            shutil.rmtree(self._folder / self._push, ignore_errors=True)
        self._push = uuid.uuid4().hex
        (self._folder / self._push).mkdir()
        return self._push

    def place(self, push: str, number: int) -> Path:
        """Where bucket `number` of a push is to be written."""
        if push != self._push:
            raise Refused(
                409, f"there is no push {push} under way: another began, or the server was restarted"
            )
        return self._folder / push / f"{number:06d}.safetensors"

    def commit(self, push: str, count: int) -> None:
        """Load a push of `count` buckets. Committing the last one again changes nothing."""
        if push and push == self._committed:
            return
        paths = [self.place(push, number) for number in range(count)]
        missing = [path.stem for path in paths if not path.is_file()]
        if missing:
            raise Refused(409, f"{len(missing)} of the {count} buckets of this push did not arrive")
        self._engine.load_weights(WeightFiles(paths))
        self.version += 1
        self._committed, self._push = push, ""
        shutil.rmtree(self._folder / push, ignore_errors=True)


def create_app(
    engine: SamplingEngine, folder: Path, fingerprint: str, on_failure: Callable[[EngineFailed], None]
) -> FastAPI:
    """The service over an engine. Weights are staged in `folder`; `fingerprint` is that of the checkpoint;
    `on_failure` is told when the engine is gone."""
    weights = Weights(engine, folder)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(engine.close)

    app = FastAPI(
        title="visor vLLM", docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan
    )

    def answer(status: int, detail: str) -> Response:
        return _json({"detail": detail}, status)

    app.add_exception_handler(Refused, lambda _, error: answer(error.status, str(error)))  # type: ignore[attr-defined]
    app.add_exception_handler(EngineBusy, lambda _, error: answer(423, str(error)))
    for wrong in (ValueError, ValidationError, SafetensorError):
        app.add_exception_handler(wrong, lambda _, error: answer(422, str(error)))

    @app.exception_handler(EngineFailed)
    async def failed(request: Request, error: EngineFailed) -> Response:
        on_failure(error)
        return answer(503, str(error))

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return answer(500, f"{type(error).__name__}: {error}")

    @app.get("/healthz")
    async def healthz() -> Response:
        return _json({"status": "ok"})

    @app.get("/v1/info")
    async def info() -> Response:
        return _json(
            Info(
                model=engine.model,
                fingerprint=fingerprint,
                max_context=engine.max_context,
                max_images=engine.max_images,
                vocab_size=engine.vocab_size,
                weights_version=weights.version,
                stamp=weights.stamp,
            ).model_dump()
        )

    @app.post("/v1/generate")
    async def generate(request: Request) -> Response:
        asked = GenerateRequest.model_validate_json(await _body(request))
        stamp = weights.stamp
        prompt = await run_in_threadpool(asked.prompt.to_engine)
        reply = await _until_gone(request, engine.generate(prompt, asked.sampling.to_engine()))
        return _json(ReplyMessage.of(reply, stamp).model_dump())

    @app.post("/v1/score")
    async def score(request: Request) -> Response:
        asked = ScoreRequest.model_validate_json(await _body(request))
        prompt = await run_in_threadpool(asked.prompt.to_engine)
        logprobs = await run_in_threadpool(engine.score, prompt, asked.reply_ids)
        return _json(ScoreReply(logprobs=logprobs, stamp=weights.stamp).model_dump())

    @app.post("/v1/reset_caches")
    async def reset_caches() -> Response:
        await run_in_threadpool(engine.reset_caches)
        return _json({"stamp": weights.stamp})

    @app.post("/v1/weights")
    async def begin() -> Response:
        async with weights.lock:
            return _json({"push": weights.begin()})

    @app.put("/v1/weights/{push}/{number}")
    async def bucket(request: Request, push: str, number: int) -> Response:
        await _to_file(request, weights.place(push, number))
        return _json({"received": number})

    @app.post("/v1/weights/{push}/commit/{count}")
    async def commit(push: str, count: int) -> Response:
        async with weights.lock:
            await run_in_threadpool(weights.commit, push, count)
        return _json({"stamp": weights.stamp, "weights_version": weights.version})

    return app


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise Refused(413, f"a request has at most {MAX_BODY_BYTES} bytes")
    return bytes(body)


async def _to_file(request: Request, path: Path) -> None:
    """Write a body to `path`; a broken one leaves nothing there."""
    half = path.with_suffix(f".{uuid.uuid4().hex}")
    size = 0
    try:
        with half.open("wb") as file:
            async for part in request.stream():
                size += len(part)
                if size > MAX_BUCKET_BYTES:
                    raise Refused(413, f"a bucket of weights has at most {MAX_BUCKET_BYTES} bytes")
                file.write(part)
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


async def _until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, or cancel it when whoever asked has closed the connection."""
    working = asyncio.ensure_future(work)
    closing = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({working, closing}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Refused(499, "the connection was closed")
        return working.result()
    finally:
        working.cancel()
        closing.cancel()


def _json(value: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(value, separators=(",", ":")), status, media_type="application/json")
