"""Engines and servers on the tiny slide policy, shared by all tests marked `vllm`."""

from pathlib import Path

import pytest

SLIDE_POLICY = Path(__file__).parents[1] / "data" / "slide_policy"
SMALL_ENGINE = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 256 << 20}
"""Arguments of vLLM for a model of 0.6M parameters."""


@pytest.fixture(scope="session")
def slide_policy() -> Path:
    """The folder of the trained tiny policy."""
    return SLIDE_POLICY


@pytest.fixture(scope="session")
def vllm_engine():
    """One engine in this process, on the slide policy; tests that load other weights put the first back."""
    pytest.importorskip("vllm")
    from visor.models.vllm_engine import LocalEngine

    engine = LocalEngine(str(SLIDE_POLICY), max_context=1024, max_images=3, engine_args=SMALL_ENGINE)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def vllm_server():
    """`visor vllm-serve` on the slide policy, with vLLM's worker in a process of its own, as the workers of
    several GPUs are."""
    pytest.importorskip("vllm")
    from engine_process import EngineProcess

    arguments = {**SMALL_ENGINE, "distributed_executor_backend": "mp"}
    options = [part for name, value in arguments.items() for part in ("--engine-arg", f"{name}={value}")]
    limits = ["--max-context", "1024", "--max-images", "3"]
    command = ["-m", "visor.cli", "vllm-serve", str(SLIDE_POLICY), "--port", "0", *limits, *options]
    process = EngineProcess(*command, seconds=600)
    yield process
    process.kill()
