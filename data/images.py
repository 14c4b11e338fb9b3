"""Any image file → a page picture: RGB, upright, on white, of usable proportions.

What a policy sees must be what a person sees. EXIF orientation is applied, 16-bit grey is scaled (not
clipped), transparency is laid over white, and a damaged file is an error, never a picture filled with grey.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageOps, UnidentifiedImageError

from visor.models.smart_resize import FACTOR, MAX_RATIO

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".bmp", ".gif"})
WHITE = (255, 255, 255)


class PageFile(NamedTuple):
    """An image file that is one page of a document made of page images."""

    number: int
    """1-based; a document may lack some."""
    path: Path
    """Absolute."""


class ImageError(ValueError):
    """An image that cannot be used; the message names the file."""


def load_page_image(path: str | Path, frame: int = 0) -> Image.Image:
    """Load an image file as a page picture, mode RGB.

    Sides are at least 28 pixels and their ratio at most 200: a smaller or longer picture is padded with
    white at the right and at the bottom, so that pixel coordinates stay what they were. `frame` picks a
    page of a multi-page TIFF. Raises ImageError for a file that is no image, is damaged or is too large.
    """
    path = Path(path)
    image = _decode(path, frame)
    return pad_to_usable(to_rgb(ImageOps.exif_transpose(image)))


def count_frames(path: str | Path) -> int:
    """Pages in an image file: the frames of a TIFF, else 1 (an animation is its first frame)."""
    with _open(Path(path)) as image:
        return getattr(image, "n_frames", 1) if image.format == "TIFF" else 1


def is_plain(path: str | Path) -> bool:
    """True when the file's own bytes show the page picture already: an upright RGB JPEG or PNG."""
    with _open(Path(path)) as image:
        return (
            image.format in ("JPEG", "PNG")
            and image.mode == "RGB"
            and "transparency" not in image.info
            and image.getexif().get(0x0112, 1) == 1
            and usable_size(*image.size) == image.size
        )


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any Pillow mode to RGB as a viewer would show it."""
    if image.mode.startswith("I") or image.mode == "F":
        return _scale_deep_grey(image).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        background = Image.new("RGBA", image.size, (*WHITE, 255))
        return Image.alpha_composite(background, image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def usable_size(width: int, height: int) -> tuple[int, int]:
    """The smallest size around (width, height) with sides ≥ 28 and a ratio ≤ 200."""
    return (
        max(width, FACTOR, math.ceil(height / MAX_RATIO)),
        max(height, FACTOR, math.ceil(width / MAX_RATIO)),
    )


def pad_to_usable(image: Image.Image) -> Image.Image:
    """Pad an RGB image with white, right and bottom, to `usable_size`."""
    size = usable_size(*image.size)
    if size == image.size:
        return image
    canvas = Image.new("RGB", size, WHITE)
    canvas.paste(image, (0, 0))
    return canvas


def shrink_to(image: Image.Image, max_pixels: int) -> Image.Image:
    """Scale an image down, proportions kept, until width × height ≤ `max_pixels`."""
    width, height = image.size
    if width * height <= max_pixels:
        return image
    scale = math.sqrt(max_pixels / (width * height))
    size = (max(1, int(width * scale)), max(1, int(height * scale)))
    return image.resize(size, Image.Resampling.LANCZOS)


def _open(path: Path) -> Image.Image:
    try:
        image = Image.open(path)
    except UnidentifiedImageError:
        raise ImageError(f"{path.name} {_why_unidentified(path)}") from None
    except Image.DecompressionBombError:
        raise ImageError(f"{path.name} has too many pixels to decode safely; scale it down") from None
    except (OSError, SyntaxError, ValueError) as error:
        raise ImageError(f"{path.name} is a damaged image: {error}") from None
    return image


def _why_unidentified(path: Path) -> str:
    if path.suffix.lower() not in IMAGE_SUFFIXES:
        return "has an unsupported type, expected PDFs or images"
    return "is an empty file" if path.stat().st_size == 0 else "is not an image this program can read"


def _decode(path: Path, frame: int) -> Image.Image:
    with _open(path) as image:
        try:
            if frame:
                image.seek(frame)
            image.load()
        except (OSError, SyntaxError, ValueError, EOFError) as error:
            # Pillow raises each of these for damaged data, depending on the format.
            raise ImageError(f"{path.name} is a truncated or damaged image: {error}") from None
        return image.copy()


def _scale_deep_grey(image: Image.Image) -> Image.Image:
    """16-bit, 32-bit or float grey → 8 bits, the whole range kept."""
    import numpy as np  # slow to load, and few images need it

    values = np.asarray(image, dtype=np.float64)
    values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    if image.mode.startswith("I;16") or (image.mode == "I" and low >= 0 and 255 < high <= 65535):
        low, high = 0.0, 65535.0
    elif low >= 0 and high <= 1 and image.mode == "F":
        low, high = 0.0, 1.0
    elif low >= 0 and high <= 255:
        low, high = 0.0, 255.0
    scaled = (values - low) * (255.0 / ((high - low) or 1.0))
    return Image.fromarray(np.rint(scaled).astype(np.uint8))
