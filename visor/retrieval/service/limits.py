"""How much is served, and what is not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What one request may hold, and how much may wait. Each has an option of `visor serve`."""

    max_body_bytes: int = 1 << 20
    max_queries: int = 256
    """Queries of one request."""
    max_query_chars: int = 20_000
    max_top_k: int = 1000
    max_waiting: int = 1024
    """Queries that wait for the scorer; more are turned away (429)."""
    max_batch: int = 64
    """Queries scored at once."""
    body_seconds: float = 10.0
    """Time for a request's body to arrive."""


class Refused(Exception):
    """A request that is not served: an HTTP status and a sentence that says why."""

    def __init__(self, status: int, sentence: str, retry_after: int | None = None):
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.retry_after = retry_after
        """Seconds."""
