"""What a run was made with, written beside its rows; a resumed run must agree with it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from visor.types import SCHEMA_VERSION, Record

MANIFEST_NAME = "manifest.json"
PACKAGES = ("torch", "transformers", "trl", "vllm", "openai", "bm25s", "numpy", "pillow", "pypdfium2")
UNCOMPARED = ("created", "command", "git_commit", "git_dirty", "arguments")
"""Recorded, but no reason to refuse: `code_fingerprint` stands for the commit, and what matters of the
arguments (model, data, sampling, episode, judge, layer) stands in fields of its own, so that another batch
size, number of workers or question limit resumes freely."""
MAY_CHANGE = ("schema_version", "code_fingerprint", "python", "packages", "questions")
"""Not compared either while a file of trajectories grows."""


class RunManifest(Record):
    """One evaluation or rollout run."""

    schema_version: int = SCHEMA_VERSION
    created: str = ""
    command: list[str] = []
    git_commit: str | None = None
    """None = not run from a git checkout."""
    git_dirty: bool | None = None
    code_fingerprint: str = ""
    python: str = ""
    packages: dict[str, str] = {}
    """Versions of the installed ones of PACKAGES."""
    arguments: dict[str, Any] = {}
    """The whole configuration, as resolved."""
    system: str = ""
    model: dict[str, Any] = {}
    """Kind, and name and URL or path and fingerprint."""
    corpus: dict[str, Any] = {}
    """Path, hash, page count, hash of the captions."""
    index: dict[str, Any] = {}
    """Path, retriever name, retriever fingerprint."""
    questions: dict[str, Any] = {}
    """Path, hash, number of questions."""
    judge: str = ""
    episode: dict[str, Any] = {}
    """Settings of the system: of visor's episode, or of the loop of another one."""
    taec: dict[str, Any] = {}
    intervention: dict[str, Any] = {}
    """Neutral tokens added to the prompts, and the run that retrieval is frozen to; {} = none."""
    sampling: dict[str, Any] = {}
    seed: int = 0


class MixedRunError(ValueError):
    """The folder holds rows of a run that was made with something else."""


def environment_fields(root: str | Path | None = None) -> dict[str, Any]:
    """The manifest fields that follow from the machine and the checkout."""
    root = Path(root) if root else Path(__file__).parents[1]
    status = _git(root, "status", "--porcelain")
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": _git(root, "rev-parse", "HEAD"),
        "git_dirty": None if status is None else bool(status),
        "python": platform.python_version(),
        "packages": _package_versions(),
    }


def differences(
    stored: RunManifest, current: RunManifest, uncompared: Sequence[str] = UNCOMPARED
) -> list[str]:
    """Name each compared field that differs, nested ones dotted, with both values.

    A `path` is never compared: what it holds has a hash beside it, and may be moved. A TAEC layer that is
    on in one of them only is one line, not a line for each of its settings.
    """
    layers = [m.taec.get("operators") or "off" for m in (stored, current)]
    switched = layers[0] != layers[1] and "off" in layers
    uncompared = (*uncompared, "taec") if switched else uncompared
    before, after = (
        _flat({k: v for k, v in m.model_dump(mode="json").items() if k not in uncompared})
        for m in (stored, current)
    )
    for fields in (before, after):
        for key in [key for key in fields if key.endswith(".path")]:
            del fields[key]
    lines = [f"taec: {layers[0]} → {layers[1]}"] if switched else []
    return lines + [
        f"{key}: {before.get(key)!r} before, {after.get(key)!r} now"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def open_run(folder: str | Path, manifest: RunManifest, allow_mixed: bool = False) -> list[str]:
    """Write the manifest of a new run, or check a resumed one against the manifest in the folder.

    Returns the differences that were allowed. Raises MixedRunError naming them when they are not; the
    stored manifest then stays as it is. With `allow_mixed` the current manifest is kept beside it as
    `manifest-2.json`, `-3`, ….
    """
    path = Path(folder) / MANIFEST_NAME
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, manifest)
        return []
    return _compare(path, read_manifest(folder), manifest, UNCOMPARED, str(folder), allow_mixed)


def open_output(output: str | Path, manifest: RunManifest, allow_mixed: bool = False) -> list[str]:
    """`open_run` for a file of trajectories, whose manifest stands beside it as `OUTPUT.manifest.json`.

    What shapes a trajectory is compared: model, corpus, index, episode, layer, sampling, judge and seed. Code
    and packages may change while a teacher works through its questions, and questions may be added.
    """
    output = Path(output)
    path = output.with_name(f"{output.name}.{MANIFEST_NAME}")
    if path.exists():
        stored = _read(path)
        return _compare(path, stored, manifest, (*UNCOMPARED, *MAY_CHANGE), str(output), allow_mixed)
    if output.exists() and output.stat().st_size and not allow_mixed:
        raise MixedRunError(
            f"{output} holds trajectories, but no {path.name} beside it says what made them; take another "
            "output, or --allow_mixed to add to it all the same"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, manifest)
    return []


def read_manifest(folder: str | Path) -> RunManifest:
    """The manifest of a run folder; ValueError when there is none or it cannot be read."""
    path = Path(folder) / MANIFEST_NAME
    if not path.is_file():
        raise ValueError(f"{folder} is no run folder: it has no {MANIFEST_NAME}")
    return _read(path)


def _read(path: Path) -> RunManifest:
    try:
        return RunManifest.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise ValueError(f"{path} is not a run manifest: {error.errors()[0]['msg']}") from error


def _compare(
    path: Path,
    stored: RunManifest,
    current: RunManifest,
    uncompared: Sequence[str],
    name: str,
    allow_mixed: bool,
) -> list[str]:
    """The differences, when they are allowed; the current manifest is then kept beside the stored one."""
    differing = differences(stored, current, uncompared)
    if differing and not allow_mixed:
        raise MixedRunError(
            f"{name} holds rows of a run that differs in\n  "
            + "\n  ".join(differing)
            + "\nTake another output, or --allow_mixed to add to it all the same."
        )
    if differing:
        number = 2 + len(list(path.parent.glob(f"{path.stem}-*.json")))
        _write(path.with_name(f"{path.stem}-{number}.json"), current)
    return differing


def write_json(path: str | Path, value: Any) -> None:
    """Replace a JSON file as a whole: written beside it, synced, renamed."""
    path = Path(path)
    beside = path.with_name(path.name + ".tmp")
    with open(beside, "w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, indent=2, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def _write(path: Path, manifest: RunManifest) -> None:
    write_json(path, manifest.model_dump(mode="json"))


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix: value} if prefix else {}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _git(root: Path, *arguments: str) -> str | None:
    """Output of a git command, or None where there is no checkout or no git."""
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _package_versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
