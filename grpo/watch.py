"""The watchdog of a training run: which stages it has, whom they wait for, and how to go on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from grpo.arguments import GrpoConfig
from grpo.checkpoint import latest_checkpoint
from grpo.heartbeats import Heartbeats
from visor.watchdog import Watchdog

WHOLE = ("rollout", "validation")
"""Stages that contain the others."""
SHARED = ("gather", "push", "save", "update")
"""Stages in which a process may wait for the others."""
JUDGE_MARGIN = 60.0
"""Seconds for the waits between a judge's retries."""


def run_watchdog(config: GrpoConfig, rank: int, size: int) -> AbstractContextManager:
    """Watches the steps of a run in process `rank` of `size`; nothing without a `stage_timeout`."""
    if config.stage_timeout is None:
        return nullcontext()
    output_dir = Path(config.output_dir)
    beats = Heartbeats(output_dir, rank, size) if size > 1 else None
    return Watchdog(
        config.stage_timeout,
        name=f"process {rank} of {size}" if size > 1 else "",
        limits={"judge": _judge_limit(config)},
        whole=WHOLE,
        shared=SHARED,
        others_hang=beats.others_hang if beats else None,
        beat=beats.beat if beats else None,
        details=(last_engine_line(),),
        advice=lambda: _advice(output_dir),
    )


def _judge_limit(config: GrpoConfig) -> float:
    """Seconds that one reply of a model as judge may take with all its retries; 0 for a rule."""
    if ":" not in config.judge:
        return 0.0
    options = config.judge_options
    return options.timeout * (options.max_retries + 1) * 1.1 + JUDGE_MARGIN


def _advice(output_dir: Path) -> str:
    checkpoint = latest_checkpoint(output_dir)
    where = f"goes on from {checkpoint}" if checkpoint else "begins anew, there is no checkpoint yet"
    return f"the run ends with status 4; the same command {where}"


def last_engine_line() -> Callable[[], str]:
    """A function that gives the last line vLLM logged in this process from now on, or nothing."""
    handler = _LastRecord()
    logging.getLogger("vllm").addHandler(handler)
    return lambda: f"engine: {handler.line}" if handler.line else ""


class _LastRecord(logging.Handler):
    line = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.line = record.getMessage().splitlines()[-1] if record.getMessage() else self.line
