"""The end of a process that shared a run with others."""

from __future__ import annotations

import atexit
import os
import sys


def leave(status: int) -> None:
    """End the process with an exit status; returns for the status 0 of a process that was alone.

    Where gloo connected the processes, the end is at once: exit handlers run and output is written, but the
    interpreter is not taken down piece by piece. Gloo's threads outlive the process group (the model's
    reducer holds on to it), and one that gives a tensor back to an interpreter on its way down aborts the
    process ("terminate called without an active exception", pytorch/pytorch issue 190489).
    """
    from accelerate import PartialState

    if "gloo" in (PartialState._shared_state.get("backend") or ""):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    if status:
        raise SystemExit(status)
