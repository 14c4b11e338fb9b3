"""A server of a model as a child process."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).parents[1]


class EngineProcess:
    """Runs a Python command that prints `serving MODEL at URL` once it is ready."""

    def __init__(self, *command: str, seconds: float = 60):
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, closed with the process
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.url = ""
        ready = threading.Event()
        threading.Thread(target=self._read, args=(ready,), daemon=True).start()
        if not ready.wait(seconds) or not self.url:
            self.kill()
            raise AssertionError(f"the server is not ready after {seconds} s: {self.errors()[-3000:]}")

    def errors(self) -> str:
        return os.pread(self._errors.fileno(), 1 << 20, 0).decode("utf-8", "replace")

    def stop(self, seconds: float = 60) -> int:
        """SIGTERM; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def kill(self) -> None:
        """SIGKILL to the server and its workers."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _read(self, ready: threading.Event) -> None:
        for line in self.process.stdout:
            if line.startswith("serving "):
                self.url = line.rpartition(" at ")[2].strip()
                ready.set()
        ready.set()
