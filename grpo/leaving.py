"""The end of a run of several processes."""

from __future__ import annotations

import gc


def leave_processes() -> None:
    """Take leave of the other processes, once nothing of the run is referred to any more.

    The threads in which gloo works hold tensors of the last exchange a moment longer than the exchange lasts,
    and give them back to Python. Do they so while the interpreter shuts down, the process aborts ("terminate
    called without an active exception", pytorch/pytorch issue 190489). They end with the process group, and
    that with its last user, which may be a model that waits in a cycle for the garbage collector.
    """
    import torch.distributed as dist

    gc.collect()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
