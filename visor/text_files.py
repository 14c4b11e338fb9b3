"""Text files that a user gives: UTF-8, or an error that names the file."""

from __future__ import annotations

from pathlib import Path


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file, without a byte order mark. Raises ValueError naming a file that is not
    UTF-8, and OSError where it cannot be read."""
    path = Path(path)
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text (byte {error.start + 1} is no part of a character)"
        ) from None
