"""A FastAPI application on a socket until a signal: what the project's services have in common."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

MAX_HEADER_BYTES = 1 << 20
"""Of a request line with headers: peers of the search service put a hundred queries into one URL."""
KEEP_ALIVE_SECONDS = 75
"""Longer than our clients keep an idle connection, so that they never send into a closing one."""
SHUTDOWN_SECONDS = 5
MAX_CONNECTIONS = 1000


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. OSError in words when the address is taken or is not this machine's."""
    if not 0 <= port <= 65535:
        raise ValueError(f"cannot listen at {host}:{port}: a port is 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        # A server started again takes its port back although connections of the one before linger.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise OSError(
            f"cannot listen at {host}:{port}: {error.strerror}; choose another --host or --port"
        ) from None
    listener.listen(2048)
    return listener


def address_of(listener: socket.socket, what_strangers_may: str) -> str:
    """The URL of a listening socket. Warns on stderr when other machines can reach it."""
    host, port = listener.getsockname()[:2]
    if not ipaddress.ip_address(host).is_loopback:
        print(
            f"warning: {host} can be reached from other machines; anyone there may {what_strangers_may}",
            file=sys.stderr,
        )
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def run_until_signal(app: Any, listener: socket.socket, on_server: Callable[[Any], None]) -> None:
    """Serve `app` until SIGTERM or Ctrl-C, then let the requests under way end. `on_server` is given the
    uvicorn server before it runs; setting its `should_exit` ends it too. ImportError without uvicorn."""
    import uvicorn

    class Server(uvicorn.Server):
        """Stops cleanly at a signal and lets the command go on; uvicorn's would raise it again."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self.handle_exit, number, None)
            yield

    server = Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="on",
            ws="none",
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            http="h11",
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
    )
    on_server(server)
    server.run(sockets=[listener])
