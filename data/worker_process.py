"""The program of a worker process: reads tasks from standard input, one JSON line each, and answers each with
a line on standard output. It ends when its input does, so it never outlives the process that started it.

A reply is {"value": …}, or {"error": text, "kind": …} where kind is "document" (a fault of what was given),
"disk" (no room to write) or "engine" (a library that is missing or does not start).
"""

from __future__ import annotations

import errno
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data.chunks import run_chunk
from data.pdf import DocumentError

MEMORY_LIMIT = 4 << 30
"""Bytes of data of one worker. A damaged file that asks for more fails alone, before the machine runs out."""


class EngineError(RuntimeError):
    """A library that the task needs cannot be used here."""


def main(tasks: dict[str, Callable[[dict[str, Any]], Any]] | None = None) -> None:
    """Serve tasks until the input ends; `tasks` maps the name of a task to the function that does it."""
    tasks = tasks or {"render": run_chunk, "read": _read_page}
    replies = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not get between the replies
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    _limit_memory()
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    _send(replies, {"ready": True})
    while True:
        _send(replies, answer(json.loads(requests.get()), tasks))


def answer(request: dict[str, Any], tasks: dict[str, Callable[[dict[str, Any]], Any]]) -> dict[str, Any]:
    """Do one task; whatever goes wrong becomes a reply."""
    path = Path(request["path"])
    try:
        return {"value": tasks[request["task"]](request)}
    except DocumentError as error:
        return {"error": str(error), "kind": "document"}
    except EngineError as error:
        return {"error": str(error), "kind": "engine"}
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return {"error": str(error), "kind": "disk"}
        return {"error": f"{path.name} cannot be read: {error.strerror or error}", "kind": "document"}
    except MemoryError:
        text = f"{path.name} needs more than {MEMORY_LIMIT >> 30} GiB of memory"
        return {"error": text, "kind": "document"}
    except Exception as error:  # one bad document must not end the run
        return {"error": f"{path.name} failed: {type(error).__name__}: {error}", "kind": "document"}


def _read_page(request: dict[str, Any]) -> str:
    from data.ocr import read_image_file  # loads the engine at its first page

    return read_image_file(Path(request["path"]))


def _listen(requests: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        requests.put(line)
    os._exit(0)


def _limit_memory() -> None:
    try:
        import resource

        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = MEMORY_LIMIT if hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    except (ImportError, OSError, ValueError):
        return  # a system without such limits


def _send(descriptor: int, message: dict[str, Any]) -> None:
    data = memoryview(json.dumps(message).encode() + b"\n")
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except BrokenPipeError:
        os._exit(0)
