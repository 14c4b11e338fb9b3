"""A small least-recently-used cache, bounded by weight (bytes, or a count)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LRUCache(Generic[Value]):
    """Keeps the values used last, up to `max_weight` in all; safe to share between threads."""

    def __init__(self, max_weight: int, weight: Callable[[Value], int] = lambda value: 1):
        self.max_weight = max_weight
        self._weight = weight
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._total = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Return the value of `key`, made by `make()` when it is not here. A value heavier than the whole
        cache is returned and not kept."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        with self._lock:
            if key not in self._values:
                self._values[key] = value
                self._total += self._weight(value)
            while self._total > self.max_weight:
                _, dropped = self._values.popitem(last=False)
                self._total -= self._weight(dropped)
        return value

    def peek(self, key: Hashable) -> Value | None:
        """Return the value of `key` if it is here, else None."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self._total = 0

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._values
