"""Faults of vLLM that keep an engine from starting in a process that does more than serve."""

from __future__ import annotations

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
