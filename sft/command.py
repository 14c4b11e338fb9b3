"""How the commands of this folder end when the user made a mistake."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def explained(prog: str) -> Iterator[None]:
    """Turn a ValueError or a file that cannot be read into one line and exit status 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
