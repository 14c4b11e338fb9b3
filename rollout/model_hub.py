"""Uploads of a run's models to the Hugging Face hub, beside the training and never in its way."""

from __future__ import annotations

import fnmatch
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from visor.config import Config

MODEL_FILES = (
    "README.md",
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "tokenizer*",
    "chat_template*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*processor_config.json",
)
"""What is uploaded of a folder: the model, its processor and its card. Optimizer and random state, metrics,
trajectories and the settings with this machine's paths stay here."""
_STAGING = ".hub-upload"


class HubOptions(Config):
    push_to_hub: bool = False
    """Upload the models to the Hugging Face hub. The token comes from HF_TOKEN or `hf auth login`."""
    hub_model_id: str | None = None
    """Repository, NAME or OWNER/NAME; null: the name of output_dir, of the token's user."""
    hub_private_repo: bool | None = None
    """Of a repository made by this run; null: what its owner's settings say."""
    hub_strategy: Literal["end", "every_save"] = "every_save"
    """end: the final model. every_save: the model of every checkpoint too, into the same place."""


class ModelHub:
    """Uploads model folders to one repository, one after the other, in a thread.

    Only a missing token or a refused repository stops a run, before it starts. Whatever the hub does later is
    a warning, and the run goes on.
    """

    def __init__(self, options: HubOptions, output_dir: str | Path) -> None:
        """ValueError when there is no token, or the hub refuses the repository."""
        from huggingface_hub import HfApi, get_token

        self.options = options
        self.output_dir = Path(output_dir)
        self.repository = options.hub_model_id or self.output_dir.absolute().name
        if get_token() is None:
            raise ValueError(
                "push_to_hub needs a token of the hub: set HF_TOKEN or run `hf auth login`, or leave "
                "push_to_hub out"
            )
        self._api = HfApi()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="hub")
        self._running: Future | None = None
        self._created = False
        self._open()

    def saved(self, folder: Path, step: int) -> None:
        """A checkpoint was written. With every_save its model is uploaded, unless an upload still runs."""
        busy = self._running is not None and not self._running.done()
        if self.options.hub_strategy != "every_save" or busy:
            return
        staged = self._stage(folder)
        self._running = self._executor.submit(self._attempt, staged, f"Training in progress, step {step}")

    def finish(self) -> None:
        """Upload the final model in the output folder, wait for it, and say where it is."""
        staged = self._stage(self.output_dir)
        error = self._executor.submit(self._attempt, staged, "End of training").result()
        self._executor.shutdown()
        if error is None:
            print(f"the model is at {self._api.endpoint}/{self.repository}", flush=True)
            return
        kept = " ".join(f"--include '{pattern}'" for pattern in MODEL_FILES)
        print(
            f"the final model is not on the hub ({error}), and it is whole in {self.output_dir}; upload it "
            f"with: hf upload {self.repository} {self.output_dir} . {kept}",
            file=sys.stderr,
            flush=True,
        )

    def _open(self) -> None:
        from huggingface_hub.errors import HfHubHTTPError

        try:
            self._create()
        except HfHubHTTPError as error:
            if error.response.status_code in (400, 401, 403):
                raise ValueError(
                    f"push_to_hub: the hub refuses the repository {self.repository} "
                    f"({_first_line(error)}); set hub_model_id to one that the token may write to"
                ) from error
            _warn("cannot make the repository yet", error)
        except Exception as error:  # no connection: the HTTP library's own kinds
            _warn("cannot make the repository yet", error)

    def _create(self) -> None:
        private = self.options.hub_private_repo
        made = self._api.create_repo(self.repository, private=private, exist_ok=True)
        self.repository, self._created = made.repo_id, True

    def _attempt(self, staged: Path, message: str) -> str | None:
        """Upload a staged folder and remove it; returns what went wrong."""
        try:
            if not self._created:
                self._create()
            self._api.upload_folder(
                repo_id=self.repository, folder_path=staged, commit_message=message, allow_patterns=["*"]
            )
        except Exception as error:  # whatever the hub or the line to it does, the run is not lost
            _warn(f"upload failed ({message})", error)
            return _first_line(error)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        return None

    def _stage(self, folder: Path) -> Path:
        """A folder with the model files of another, which may be deleted during the upload."""
        staged = self.output_dir / _STAGING / folder.name
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        for path in model_files(folder):
            _link(path, staged / path.name)
        return staged


def model_files(folder: Path) -> list[Path]:
    """The files of a model's folder that are uploaded."""
    found = (path for path in sorted(folder.iterdir()) if path.is_file())
    return [path for path in found if any(fnmatch.fnmatch(path.name, pattern) for pattern in MODEL_FILES)]


def open_hub(
    options: HubOptions, output_dir: str | Path, main_process: Callable[[], bool]
) -> ModelHub | None:
    """The hub of a run, or None where nothing is to be uploaded, or by another process."""
    return ModelHub(options, output_dir) if options.push_to_hub and main_process() else None


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def _warn(what: str, error: Exception) -> None:
    print(f"warning: hub: {what}: {_first_line(error)}", file=sys.stderr, flush=True)


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
