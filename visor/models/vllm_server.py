"""`visor vllm-serve`: a vLLM engine of its own process or machine, for evaluation and for training runs that
push their weights into it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import Any

from visor.http_serving import address_of, listen, run_until_signal
from visor.models.sampling_engine import EngineFailed

HOST, PORT = "127.0.0.1", 8770
EXIT_OK, EXIT_FAILED = 0, 1


def serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder of a Qwen2.5-VL checkpoint, or its hub name")
    parser.add_argument("--host", default=HOST, help=f"address to listen at (default: {HOST})")
    parser.add_argument("--port", type=int, default=PORT, help=f"0 takes a free one (default: {PORT})")
    parser.add_argument("--max-context", type=int, metavar="TOKENS", help="(default: the checkpoint's)")
    parser.add_argument("--max-images", type=int, metavar="N", help="images of a prompt (default: 16)")
    parser.add_argument("--dtype", default="auto", help="auto (as stored), bfloat16 or float32")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="GPUs (default: 1)")
    parser.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another argument of vLLM's engine, its value as in YAML; may be given several times",
    )


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; exit code 0 then, 1 when the engine died. ValueError or OSError when it
    cannot start."""
    engine_args = {
        "dtype": arguments.dtype,
        "tensor_parallel_size": arguments.tensor_parallel_size,
        **dict(_engine_argument(text) for text in arguments.engine_arg),
    }
    try:
        from visor.models.vllm_app import create_app
    except ImportError as error:
        raise ValueError(
            f"visor vllm-serve needs {error.name}; install it: pip install 'visor-rag[serve,vllm]'"
        ) from None
    from visor.models.vllm_engine import LocalEngine
    from visor.models.weight_files import checkpoint_fingerprint, staging_folder

    # Loading takes minutes, in which nothing listens to a signal but this.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_OK))
    failures: list[EngineFailed] = []
    with listen(arguments.host, arguments.port) as listener, staging_folder() as folder:
        url = address_of(listener, "sample from this model and replace its weights")
        print(f"loading {arguments.model}", file=sys.stderr, flush=True)
        engine = LocalEngine(
            arguments.model,
            max_context=arguments.max_context,
            max_images=arguments.max_images,
            engine_args=engine_args,
        )

        def on_server(server: Any) -> None:
            def give_up(error: EngineFailed) -> None:
                failures.append(error)
                server.should_exit = True

            app.state.give_up = give_up
            print(f"serving {arguments.model} at {url}", flush=True)

        fingerprint = checkpoint_fingerprint(arguments.model)
        app = create_app(engine, folder, fingerprint, lambda error: app.state.give_up(error))
        run_until_signal(app, listener, on_server)
    if failures:
        print(f"visor vllm-serve: {failures[0]}", file=sys.stderr)
        return EXIT_FAILED
    print("stopped", file=sys.stderr)
    return EXIT_OK


def _engine_argument(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise ValueError(f"--engine-arg {text!r}: give NAME=VALUE, such as gpu_memory_utilization=0.4")
    import yaml

    return name, yaml.safe_load(value)
