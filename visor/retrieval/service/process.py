"""`visor serve` as a child process, for scripts and tests that need a service for as long as they run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path


class ServiceProcess:
    """Starts `visor serve CORPUS --port 0 OPTION…` and returns once it is ready; `stop` or `with` ends it."""

    def __init__(self, corpus: str | Path, *options: str, port: int = 0, seconds: float = 60.0):
        """Raises ValueError with what the command said when it ends instead, or is not ready in time."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, closed with the process
        command = [sys.executable, "-m", "visor.cli", "serve", str(corpus), "--port", str(port), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._errors, text=True)
        self.url = ""
        self.fingerprint = ""
        ready = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(ready,), daemon=True)
        self._reader.start()
        if not ready.wait(seconds) or not self.fingerprint:
            self.kill()
            raise ValueError(
                f"visor serve did not become ready: {self.errors().strip() or 'it said nothing'}"
            )

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def errors(self) -> str:
        """What it has written to stderr so far."""
        # The child writes at the shared position of the file: read without moving it.
        return os.pread(self._errors.fileno(), 1 << 20, 0).decode("utf-8", "replace")

    def stop(self, seconds: float = 20.0) -> int:
        """SIGTERM; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def kill(self) -> None:
        """SIGKILL: the process is gone when this returns, and so are its connections."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> ServiceProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def _read(self, ready: threading.Event) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("serving "):
                self.url = line.rpartition(" at ")[2].strip()
            elif line.startswith("fingerprint "):
                self.fingerprint = line.split()[1]
                ready.set()
        ready.set()
