"""Faults of vLLM that keep an engine from starting in a process that does more than serve."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any


def tolerate_odd_attributes() -> None:
    """Let vLLM's search for kernels pass over objects whose `__dict__` is none.

    On a CPU vLLM 0.31 reads the dictionary of everything that any loaded module holds. llvmlite (of numba,
    which bm25s loads) has a handle that answers every attribute name, `__dict__` too, with a function.
    """
    try:
        from vllm.triton_utils import dispatcher
    except ImportError:  # other versions have no such search
        return

    def dictionary(value: Any) -> Mapping[str, Any]:
        found = value.__dict__
        return found if isinstance(found, Mapping) else {}

    # The name as the module sees it; the builtin stays.
    dispatcher.vars = dictionary


def say_once() -> None:
    """Let vLLM's CPU worker say each thing once: it warns of a setting that vLLM itself makes, and that the
    worker has switched off, at every picture."""
    logger = logging.getLogger("vllm.v1.worker.cpu_worker")
    if not any(isinstance(each, _Once) for each in logger.filters):
        logger.addFilter(_Once())


class _Once(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        is_new = message not in self._said
        self._said.add(message)
        return is_new
