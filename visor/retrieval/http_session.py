"""HTTP requests that outlast a server that is away for seconds."""

from __future__ import annotations

import ipaddress
import random
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import httpx2

TRANSIENT_STATUSES = frozenset({429, 502, 503, 504})
TRANSIENT_ERRORS = (httpx2.TimeoutException, httpx2.NetworkError, httpx2.RemoteProtocolError)
FIRST_WAIT, GROWTH, LONGEST_WAIT = 0.2, 2.0, 8.0
"""Seconds before the second try, by how much each later wait is longer, and the most of it."""
JITTER = 0.25
"""Share by which a wait is drawn shorter or longer, so that clients do not come back all at once."""
IDLE_SECONDS = 30


class RetrievalError(ConnectionError):
    """A search that a retrieval service did not answer: it is away, it refused, or it is another one now."""

    def __init__(self, sentence: str, status: int | None = None):
        super().__init__(sentence)
        self.status = status
        """HTTP status of a refusal."""


class HttpSession:
    """A pool of kept-alive connections to one server; for any number of threads.

    What may pass is tried again with growing waits: no connection, a time-out, a broken connection, and the
    statuses 429 (at least its Retry-After), 502, 503 and 504. Anything else is an error at once. All requests
    must be safe to repeat.
    """

    def __init__(self, url: str, timeout: float, budget: float, max_connections: int):
        """`timeout`: seconds of one try; `budget`: seconds of all tries of a request with their waits."""
        self.url = url.rstrip("/")
        self.budget = budget
        self._timeout = timeout
        self._ended = threading.Event()
        # A generator of its own: the global one belongs to whoever seeds a run.
        self._random = random.Random()
        self._client = httpx2.Client(
            timeout=timeout,
            trust_env=not _is_loopback(url),  # a proxy cannot reach this machine's own address
            limits=httpx2.Limits(
                max_connections=max_connections,
                max_keepalive_connections=max_connections,
                keepalive_expiry=IDLE_SECONDS,
            ),
        )

    def request(self, method: str, path: str, budget: float | None = None, **content: Any) -> httpx2.Response:
        """The reply, status 2xx. Raises RetrievalError for a refusal and when the budget is spent.

        `content`: as httpx takes it (`json`, `params`).
        """
        budget = self.budget if budget is None else budget
        deadline = time.monotonic() + budget
        tries = 0
        while True:
            tries += 1
            try:
                response = self._try(method, path, deadline, content)
                if response.status_code not in TRANSIENT_STATUSES:
                    return self._checked(response)
                problem, status = f"{response.status_code}, {_detail(response)}", response.status_code
                wait = _retry_after(response)
            except TRANSIENT_ERRORS as error:
                problem, status, wait = _told(error), None, 0.0
            except httpx2.HTTPError as error:
                raise RetrievalError(f"the search service {self.url} failed: {_told(error)}") from None
            except RuntimeError as error:
                if not self._ended.is_set():  # httpx's word for a client that was closed
                    raise
                raise RetrievalError(f"the connection to {self.url} is closed") from error
            wait = max(wait, self._growing_wait(tries))
            if time.monotonic() + wait >= deadline:
                times = f"{tries} tries" if tries > 1 else "one try"
                raise RetrievalError(
                    f"the search service {self.url} did not answer within {budget:g} s ({times}); "
                    f"the last time: {problem}",
                    status,
                )
            if self._ended.wait(wait):
                raise RetrievalError(f"the connection to {self.url} is closed")

    def close(self) -> None:
        """Close the connections; requests that wait for another try end with RetrievalError."""
        self._ended.set()
        self._client.close()

    def _try(self, method: str, path: str, deadline: float, content: dict[str, Any]) -> httpx2.Response:
        if self._ended.is_set():
            raise RetrievalError(f"the connection to {self.url} is closed")
        seconds = max(min(self._timeout, deadline - time.monotonic()), 0.001)
        # Waiting for a free connection is waiting for our own other requests, not for the server.
        timeout = httpx2.Timeout(seconds, pool=None)
        return self._client.request(method, self.url + path, timeout=timeout, **content)

    def _checked(self, response: httpx2.Response) -> httpx2.Response:
        if response.is_success:
            return response
        raise RetrievalError(
            f"the search service {self.url} refused the request ({response.status_code}): "
            f"{_detail(response)}",
            response.status_code,
        )

    def _growing_wait(self, tries: int) -> float:
        wait = min(FIRST_WAIT * GROWTH ** (tries - 1), LONGEST_WAIT)
        return wait * self._random.uniform(1 - JITTER, 1 + JITTER)


def _detail(response: httpx2.Response) -> str:
    """What the server says about a refusal."""
    try:
        detail = response.json()["detail"]
    except (ValueError, KeyError, TypeError):
        detail = response.text
    text = " ".join(str(detail).split())
    return (text if len(text) <= 300 else text[:299] + "…") or "no reason given"


def _retry_after(response: httpx2.Response) -> float:
    """Seconds; a date or nonsense counts as none."""
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isascii() and value.isdigit() and len(value) < 6 else 0.0


def _told(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
