"""Hashes of a model folder: of its weights, and of what prepares its inputs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

WEIGHTS = (".safetensors", ".bin", ".pt", ".onnx")
SETTINGS = (".json", ".jinja", ".txt", ".model")
BLOCKS, BLOCK_BYTES = 256, 1 << 16


def model_folder(name: str) -> tuple[Path, str]:
    """Folder and revision ("" for a plain folder) of a model named by a path or by its place on the hub.

    A hub name is looked up in the local cache first and fetched otherwise. ValueError when it is neither.
    """
    if Path(name).is_dir():
        return Path(name), ""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) is None:
        raise ValueError(f"{name}: there is no such folder")
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except Exception:  # not in the cache, or in part
        try:
            folder = Path(snapshot_download(name))
        except Exception as error:
            raise ValueError(
                f"{name}: there is no such folder, and the hub gives no model of this name "
                f"({type(error).__name__}); give the path of a model folder"
            ) from error
    return folder, folder.name


def weights_hash(folder: Path) -> str:
    """SHA-256 over names, sizes and contents of the weight files; of a file above 16 MiB, over 256 blocks of
    64 KiB spread evenly, first and last included, so that opening an index does not read a model twice."""
    return _digest(folder, WEIGHTS, _sampled)


def settings_hash(folder: Path, *more: str) -> str:
    """SHA-256 over configuration and tokenizer files, and over `more`."""
    return _digest(folder, SETTINGS, lambda file: [file.read_bytes()], more)


def file_hash(file: Path) -> str:
    """`weights_hash` of one file."""
    digest = hashlib.sha256(str(file.stat().st_size).encode())
    for part in _sampled(file):
        digest.update(part)
    return digest.hexdigest()


def _digest(folder: Path, suffixes: tuple[str, ...], read, more: Iterable[str] = ()) -> str:
    digest = hashlib.sha256()
    for file in sorted(f for f in folder.rglob("*") if f.suffix in suffixes and f.is_file()):
        digest.update(f"{file.relative_to(folder).as_posix()}\0{file.stat().st_size}\0".encode())
        for part in read(file):
            digest.update(part)
    for text in more:
        digest.update(f"\0{text}".encode())
    return digest.hexdigest()


def _sampled(file: Path) -> Iterable[bytes]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= BLOCKS * BLOCK_BYTES:
            yield stream.read()
            return
        for block in range(BLOCKS):
            stream.seek((size - BLOCK_BYTES) * block // (BLOCKS - 1))
            yield stream.read(BLOCK_BYTES)
