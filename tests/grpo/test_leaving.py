"""How a process of several ends."""

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, sys, threading
import torch
from accelerate import PartialState
from grpo.leaving import leave
PartialState._shared_state["backend"] = sys.argv[1]
atexit.register(print, "handler")
def work():
    values = torch.ones(100)
    while True:
        values + values
# Like a thread of gloo it is in PyTorch when the interpreter shuts down, and wants back into Python.
threading.Thread(target=work, daemon=True).start()
print("last words")
leave(int(sys.argv[2]))
"""


def leaving(backend: str, status: int) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", SCRIPT, backend, str(status)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("status", [0, 3])
def test_threads_of_gloo_do_not_abort_the_process(status):
    done = leaving("cpu:gloo,cuda:nccl", status)
    assert done.returncode == status, done.stderr[-2000:]
    assert "terminate called" not in done.stderr
    assert done.stdout == "last words\nhandler\n"
