"""Text of a page image, read by rapidocr with the weights that its package brings. Nothing is downloaded.

The engine is imported when the first page is read, by the process that reads it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import Image

from data.images import ImageError, load_page_image
from data.pdf import DocumentError
from data.reading_order import Line, reading_text
from data.worker_process import EngineError

LONGEST_SIDE = 2000
"""Pixels; larger images are scaled down to it."""
SHORTEST_SIDE = 736
"""Pixels; smaller images are scaled up to it, as far as the longest side allows."""
MAX_TILE_RATIO = 3
READER = 1
"""Raised when the settings above or the reading order change: a text read before is then not
taken for a new page with the same picture."""
INSTALL = "pip install 'visor-rag[ocr]'"


def ocr_version() -> str | None:
    """Engine, its version and ours, part of the key under which a text is kept; None = not installed."""
    try:
        if find_spec("rapidocr") is None or find_spec("onnxruntime") is None:
            return None
        return f"rapidocr {version('rapidocr')} reader {READER}"
    except PackageNotFoundError:
        return None


def read_image_file(path: Path) -> str:
    """Text of a page image, in reading order. Raises DocumentError for an image that cannot be used,
    EngineError when rapidocr does not start."""
    try:
        image = load_page_image(path)
    except ImageError as error:
        raise DocumentError(str(error)) from None
    return read_image(image)


def read_image(image: Image.Image) -> str:
    """Text of an RGB image, in reading order; "" when there is none."""
    if image.getcolors(maxcolors=1) is not None:
        return ""  # a blank page
    return reading_text([line for tile in tiles_of(*image.size) for line in _lines(image, tile)])


@dataclass(frozen=True)
class Tile:
    """A part of an image, and the part of it that is this tile's own; boxes in pixels of the image."""

    box: tuple[int, int, int, int]
    own: tuple[int, int, int, int]


def tiles_of(width: int, height: int) -> list[Tile]:
    """Cut a long strip into tiles that the engine can read at full size; other images are one tile.

    Tiles overlap, so that a line at a cut is whole in one of them; it counts where its centre lies.
    """
    long, short = max(width, height), min(width, height)
    if long <= LONGEST_SIDE or long <= MAX_TILE_RATIO * short:
        return [Tile((0, 0, width, height), (0, 0, width, height))]
    count = math.ceil(long / (MAX_TILE_RATIO * short))
    overlap = short // 4
    tiles = []
    for index in range(count):
        first, last = index * long // count, (index + 1) * long // count
        wide = (max(0, first - overlap), min(long, last + overlap))
        if height >= width:
            tiles.append(Tile((0, wide[0], width, wide[1]), (0, first, width, last)))
        else:
            tiles.append(Tile((wide[0], 0, wide[1], height), (first, 0, last, height)))
    return tiles


def _lines(image: Image.Image, tile: Tile) -> Iterator[Line]:
    """The lines whose centres lie in the tile's own part, in pixels of the image."""
    import numpy as np

    part = image.crop(tile.box)
    scale = min(SHORTEST_SIDE / min(part.size), LONGEST_SIDE / max(part.size))
    scale = max(1.0, scale)  # small pictures are enlarged; the engine scales large ones down
    part = part.resize((round(part.width * scale), round(part.height * scale)))
    found = _engine()(np.asarray(part)[:, :, ::-1])  # it takes BGR, as OpenCV does
    if found.boxes is None or not found.txts:
        return
    x, y, (left, top, right, bottom) = *tile.box[:2], tile.own
    for corners, text in zip(found.boxes, found.txts):
        (x1, y1), (x2, y2) = corners.min(axis=0) / scale, corners.max(axis=0) / scale
        line = Line(float(x1) + x, float(y1) + y, float(x2) + x, float(y2) + y, text)
        if left <= (line.left + line.right) / 2 < right and top <= line.centre < bottom:
            yield line


@cache
def _engine() -> Any:
    """The engine of this process, on one thread: the worker processes are as many as the cores."""
    try:
        import cv2
        import rapidocr
    except ImportError as error:
        raise EngineError(f"OCR cannot start: {error}; install it with {INSTALL}") from None
    cv2.setNumThreads(1)
    models = Path(rapidocr.__file__).parent / "models"
    logging.getLogger("RapidOCR").setLevel(logging.ERROR)
    return rapidocr.RapidOCR(
        params={
            "Global.log_level": "error",
            "Global.max_side_len": LONGEST_SIDE,
            "Det.limit_type": "max",  # its default enlarges the short side, of strips until memory is full
            "Det.limit_side_len": LONGEST_SIDE,
            "Global.use_cls": False,  # it turns upright lines over more often than it rights any
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            # By path: the engine would fetch a file that it does not find under its own name.
            "Det.model_path": _weights(models, "det"),
            "Rec.model_path": _weights(models, "rec"),
        }
    )


def _weights(models: Path, part: str) -> str:
    found = sorted(models.glob(f"*_{part}_*.onnx"))
    if not found:
        raise EngineError(f"OCR cannot start: no weights in {models}; install it again with {INSTALL}")
    return str(found[0])
