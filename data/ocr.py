"""Text of a page image, read by rapidocr with the weights that its package brings. Nothing is downloaded.

The engine is imported when the first page is read, by the process that reads it.
"""

from __future__ import annotations

import logging
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

INSTALL = "pip install 'visor-rag[ocr]'"


def ocr_version() -> str | None:
    """Name and version of the engine, part of the key under which a text is kept; None = not installed."""
    try:
        if find_spec("rapidocr") is None or find_spec("onnxruntime") is None:
            return None
        return f"rapidocr {version('rapidocr')}"
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
    import numpy as np

    found = _engine()(np.asarray(image)[:, :, ::-1])  # it takes BGR, as OpenCV does
    if found.boxes is None or not found.txts:
        return ""
    return reading_text([_line(box, text) for box, text in zip(found.boxes, found.txts)])


def _line(box: Any, text: str) -> Line:
    """A line from the four corners (x, y) of its box."""
    left, top = box.min(axis=0)
    right, bottom = box.max(axis=0)
    return Line(float(left), float(top), float(right), float(bottom), text)


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
