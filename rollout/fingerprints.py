"""Short hashes that tell whether two runs used the same code, checkpoint and retriever."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visor.models.hub import cached_folder, is_hub_name
from visor.retrieval.fingerprint import PROBE_QUERIES, retriever_fingerprint
from visor.retrieval.index import corpus_hash

if TYPE_CHECKING:
    from visor.types import PageStore

__all__ = [
    "PROBE_QUERIES",
    "checkpoint_fingerprint",
    "code_fingerprint",
    "corpus_fingerprints",
    "file_fingerprint",
    "retriever_fingerprint",
]

ROOMS = ("visor", "data", "rewards", "rollout")
"""The packages that an evaluation's results depend on."""
SOURCE_SUFFIXES = (".py", ".yaml", ".json", ".txt")
EDGE_BYTES = 1 << 20


def code_fingerprint(root: str | Path | None = None) -> str:
    """SHA-256 over names and contents of the source and data files of the rooms an evaluation runs."""
    root = Path(root) if root else Path(__file__).parents[1]
    paths = [p for room in ROOMS for p in (root / room).rglob("*") if p.suffix in SOURCE_SUFFIXES]
    return _digest((path.relative_to(root).as_posix(), path.read_bytes()) for path in sorted(paths))


def checkpoint_fingerprint(path: str | Path) -> str:
    """SHA-256 of a checkpoint folder: small files whole, of large ones the size, first and last MiB.

    Tells checkpoints apart without reading all their weights. A hub name stands for its files in the local
    cache, and an adapter's base model counts with it. ValueError when there is no config.json or
    adapter_config.json.
    """
    folder = (cached_folder(str(path)) if is_hub_name(path) else None) or Path(path)
    adapter = folder / "adapter_config.json"
    if not adapter.is_file() and not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is no checkpoint folder: it has no config.json or adapter_config.json")
    files = [p for p in folder.iterdir() if p.suffix in (".json", ".safetensors", ".jinja", ".txt")]
    contents = [(file.name, _edges(file)) for file in sorted(files)]
    if adapter.is_file():
        base = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
        contents.append(("base model", checkpoint_fingerprint(base).encode()))
    return _digest(contents)


def corpus_fingerprints(store: PageStore) -> dict[str, Any]:
    """Page count, hash of the pages (as their index names it) and, apart from it, of their captions.

    Of a corpus with captions also the model that wrote them and the hash of the caption file.
    """
    pages = store.pages()
    captions = getattr(store, "captions", None)
    made_by = {}
    if captions is not None and captions.source == "model":
        made_by = {"captions_model": captions.model, "captions_file": captions.sha256}
    return {
        "pages": len(pages),
        "hash": corpus_hash(pages),
        "captions_hash": _digest((page.page_id, page.caption.encode()) for page in pages),
        **made_by,
    }


def file_fingerprint(path: str | Path) -> str:
    """SHA-256 of a file; ValueError when there is none."""
    if not Path(path).is_file():
        raise ValueError(f"{path}: there is no such file")
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _edges(path: Path) -> bytes:
    size = path.stat().st_size
    if size <= 2 * EDGE_BYTES:
        return path.read_bytes()
    with open(path, "rb") as file:
        first = file.read(EDGE_BYTES)
        file.seek(-EDGE_BYTES, 2)
        return str(size).encode() + first + file.read()


def _digest(named_contents: Iterable[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256()
    for name, content in named_contents:
        # Lengths first, so that no two lists of files run together to the same bytes.
        digest.update(f"{len(name.encode())}:{name}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()
