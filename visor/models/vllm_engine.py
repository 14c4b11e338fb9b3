"""vLLM's engine in this process, with continuous batching: a request joins the running ones at the next step.

One thread owns the engine: it builds it, adds requests, runs its steps and loads weights, so that nothing of
it is ever touched twice at the same time.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from visor.models.loading import load_config
from visor.models.sampling_engine import EngineBusy, EngineFailed, EnginePrompt, EngineReply, EngineSampling
from visor.models.vllm_faults import say_once, tolerate_odd_attributes
from visor.models.vllm_rope import rope_overrides
from visor.models.weight_files import (
    WeightFiles,
    check_shapes,
    checked_weights,
    expected_weights,
    written_weights,
)

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

DEFAULT_MAX_IMAGES = 16
MAX_PIXELS = 16384 * 784
BAN = -100.0
"""Added to the logit of a banned id, the most vLLM takes."""
WORKER_EXTENSION = "visor.models.vllm_worker.WeightLoader"
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
"""What vLLM reads when it is imported, unless the user has set it."""


@dataclass(frozen=True)
class _Job:
    """Something to do between two steps, and whom to tell when that cannot be done any more."""

    run: Callable[[], None]
    future: Future


class LocalEngine:
    """vLLM on the checkpoint at `path`.

    `max_context` is vLLM's `max_model_len` (None: the checkpoint's own), `max_images` its limit of images a
    prompt; `engine_args` are further arguments of `vllm.EngineArgs`. ValueError when vLLM is missing or
    cannot start on this checkpoint.
    """

    def __init__(
        self,
        path: str,
        *,
        max_context: int | None = None,
        max_images: int | None = None,
        engine_args: dict[str, Any] | None = None,
    ):
        self.model = str(path)
        self.max_images = DEFAULT_MAX_IMAGES if max_images is None else max_images
        self._inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._failure: EngineFailed | None = None
        self._running: dict[str, Future] = {}
        self._numbers = count()
        self._incomplete = ""
        settings = {
            "model": self.model,
            "max_model_len": max_context,
            "limit_mm_per_prompt": {"image": self.max_images},
            # Images arrive at their final size; the engine must not resize them again.
            "mm_processor_kwargs": {"min_pixels": 28 * 28, "max_pixels": MAX_PIXELS},
            "logprobs_mode": "raw_logprobs",
            "disable_log_stats": True,
            "worker_extension_cls": WORKER_EXTENSION,
            **(engine_args or {}),
        }
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, args=(settings, started), name="vllm", daemon=True)
        self._thread.start()
        started.result()
        atexit.register(self.close)
        config = self._llm.model_config
        self.max_context: int = config.max_model_len
        self.vocab_size: int = config.get_vocab_size()
        self._expected = expected_weights(config.hf_config)

    # ------------------------------------------------------------ what callers do

    async def generate(self, prompt: EnginePrompt, params: EngineSampling) -> EngineReply:
        output = await asyncio.wrap_future(self._submit(prompt, self._sampling_params(params)))
        return _reply(output)

    def score(self, prompt: EnginePrompt, reply_ids: Sequence[int]) -> list[float]:
        if not reply_ids:
            return []
        *context, last = reply_ids
        # The last id is sampled where it alone is allowed, so that a reply up to the last position of the
        # context can be scored; its raw log-probability does not know of the restriction.
        params = self._vllm.SamplingParams(
            temperature=0.0,
            max_tokens=1,
            logprobs=0,
            prompt_logprobs=0,
            allowed_token_ids=[last],
            ignore_eos=True,
            detokenize=False,
            output_kind=self._final_only,
        )
        scored = EnginePrompt([*prompt.token_ids, *context], prompt.images)
        output = self._submit(scored, params).result()
        entries = output.prompt_logprobs[len(output.prompt_logprobs) - len(context) :] if context else []
        entries = [*entries, output.outputs[0].logprobs[0]]
        return [float(entry[i].logprob) for entry, i in zip(entries, reply_ids, strict=True)]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._call(lambda: self._load(weights))

    def reset_caches(self) -> None:
        self._call(self._reset)

    def sleep(self) -> None:
        """Give back the memory of weights and key-value cache; needs `enable_sleep_mode`. There is nothing to
        sample with until `wake_weights`, `load_weights` and `wake_cache`."""
        self._call(lambda: self._llm.sleep(level=2))

    def wake_weights(self) -> None:
        """Take memory for weights again, to be loaded into."""
        self._call(lambda: self._llm.wake_up(["weights"]))

    def wake_cache(self) -> None:
        """Take memory for the key-value cache again."""
        self._call(lambda: self._llm.wake_up(["kv_cache"]))

    def close(self) -> None:
        atexit.unregister(self.close)
        self._inbox.put(None)
        self._thread.join()

    # ------------------------------------------------------------ from callers to the thread

    def _submit(self, prompt: EnginePrompt, params: Any) -> Future:
        """A future of the request's final output."""
        inputs: dict[str, Any] = {"prompt_token_ids": list(prompt.token_ids)}
        if prompt.images:
            inputs["multi_modal_data"] = {"image": list(prompt.images)}
        future: Future = Future()
        self._post(future, lambda: self._add(inputs, params, future))
        return future

    def _call(self, function: Callable[[], T]) -> T:
        """Run a function in the engine's thread, between two steps."""
        future: Future = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._post(future, run)
        return future.result()

    def _post(self, future: Future, run: Callable[[], None]) -> None:
        with self._lock:
            if self._failure is None:
                self._inbox.put(_Job(run, future))
                return
        raise EngineFailed(str(self._failure)) from self._failure.__cause__

    def _sampling_params(self, params: EngineSampling):
        return self._vllm.SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            max_tokens=params.max_tokens,
            seed=params.seed,
            logprobs=0,
            # The stop ids alone end a reply, whatever the checkpoint's generation config lists.
            ignore_eos=True,
            stop_token_ids=list(params.stop_ids),
            logit_bias={i: BAN for i in params.banned_ids} or None,
            detokenize=False,
            output_kind=self._final_only,
        )

    # ------------------------------------------------------------ the thread

    def _main(self, settings: dict[str, Any], started: Future) -> None:
        try:
            self._start(settings)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        failure = EngineFailed(f"the vLLM engine of {self.model} was closed")
        try:
            self._serve()
        except BaseException as error:
            failure = EngineFailed(f"the vLLM engine of {self.model} died: {type(error).__name__}: {error}")
            failure.__cause__ = error
        self._give_up(failure)
        self._llm.engine_core.shutdown()

    def _start(self, settings: dict[str, Any]) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            import vllm
            from vllm.platforms import current_platform
            from vllm.sampling_params import RequestOutputKind
            from vllm.v1.engine.llm_engine import LLMEngine
            from vllm.v1.executor import Executor, UniProcExecutor
        except ImportError as error:
            raise ValueError("a vllm: model needs the vllm package; install visor-rag[vllm]") from error
        self._vllm, self._final_only = vllm, RequestOutputKind.FINAL_ONLY
        tolerate_odd_attributes()
        say_once()
        try:
            with _random_state_kept(), _in_process():
                overrides = rope_overrides(load_config(self.model))
                settings["hf_overrides"] = {**overrides, **settings.get("hf_overrides", {})}
                if current_platform.is_cpu():
                    # After a prompt taken in pieces vLLM rewinds a request's generator, which a CPU's cannot.
                    settings.setdefault("enable_chunked_prefill", False)
                config = vllm.EngineArgs(**settings).create_engine_config()
                self._llm: Any = LLMEngine(
                    vllm_config=config,
                    executor_class=Executor.get_class(config),
                    log_stats=False,
                    multiprocess_mode=False,
                )
            self._worker_is_here = isinstance(self._llm.model_executor, UniProcExecutor)
        except Exception as error:
            raise ValueError(f"vLLM cannot start on {self.model}: {error}") from error

    def _serve(self) -> None:
        """Jobs and steps, until the job None."""
        while True:
            for job in self._jobs():
                if job is None:
                    return
                job.run()
            self._drop_cancelled()
            if self._running:
                for output in self._llm.step():
                    if output.finished:
                        _finish(self._running.pop(output.request_id), output)

    def _drop_cancelled(self) -> None:
        """End the requests that nobody waits for any more."""
        gone = [name for name, future in self._running.items() if future.cancelled()]
        if gone:
            self._llm.abort_request(gone)
        for name in gone:
            del self._running[name]

    def _jobs(self) -> Iterable[_Job | None]:
        """What waits; when nothing runs, at least one, however long it takes to come."""
        if not self._running:
            yield self._inbox.get()
        while True:
            try:
                yield self._inbox.get_nowait()
            except queue.Empty:
                return

    def _add(self, inputs: dict[str, Any], params: Any, future: Future) -> None:
        if self._incomplete:
            _finish(future, EngineFailed(self._incomplete))
            return
        name = str(next(self._numbers))
        try:
            self._llm.add_request(name, inputs, params)
        except Exception as error:  # a fault of this request alone
            _finish(future, ValueError(f"vLLM refused the prompt: {error}"))
            return
        self._running[name] = future

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self._incomplete:
            raise EngineFailed(self._incomplete)
        self._drop_cancelled()
        if self._running:
            raise EngineBusy(f"{len(self._running)} requests run; weights can be loaded when all have ended")
        if isinstance(weights, WeightFiles):
            check_shapes(weights.shapes(), self._expected)
        elif isinstance(weights, Sequence):
            check_shapes(((name, tuple(weight.shape)) for name, weight in weights), self._expected)
        try:
            self._replace(checked_weights(weights, self._expected))
        except Exception as error:
            # Some layers hold new weights and some old ones, and vLLM has no way back.
            self._incomplete = f"the vLLM engine of {self.model} holds weights loaded in part: {error}"
            raise
        self._reset()

    def _replace(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self._worker_is_here:
            self._llm.collective_rpc("load_named_weights", args=(weights,))
            return
        # Both names of tied weights, as checked_weights gives them, so that files are written anew too.
        with written_weights(weights) as files:
            self._llm.collective_rpc("load_weight_files", args=([str(path) for path in files.paths],))

    def _reset(self) -> None:
        reset = self._llm.reset_prefix_cache()
        assert reset, "vLLM kept its prefix cache"
        self._llm.reset_mm_cache()
        self._llm.reset_encoder_cache()

    def _give_up(self, failure: EngineFailed) -> None:
        """Tell everybody who waits, and everybody who comes later."""
        with self._lock:
            self._failure = failure
        waiting = list(self._running.values())
        while not self._inbox.empty():
            job = self._inbox.get()
            if job is not None:
                waiting.append(job.future)
        for future in waiting:
            _finish(future, failure)


def _finish(future: Future, result: Any) -> None:
    """Hand over a result or an exception; whoever waited may have gone."""
    try:
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
    except InvalidStateError:
        pass


def _reply(output: Any) -> EngineReply:
    reply = output.outputs[0]
    ids = list(reply.token_ids)
    return EngineReply(
        token_ids=ids,
        logprobs=[float(entry[i].logprob) for entry, i in zip(reply.logprobs, ids, strict=True)],
        finish_reason="length" if reply.finish_reason == "length" else "stop",
        prompt_ids=list(output.prompt_token_ids),
    )


@contextmanager
def _in_process() -> Iterator[None]:
    """vLLM's switch for an engine, and on a CPU its worker, in this process; read while it is built."""
    switch = "VLLM_ENABLE_V1_MULTIPROCESSING"
    before = os.environ.get(switch)
    os.environ[switch] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[switch]
        else:
            os.environ[switch] = before


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """vLLM seeds every generator of the process when it starts; a training run beside it must not notice."""
    import random

    import numpy as np
    import torch

    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
