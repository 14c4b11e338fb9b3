"""What a build of an index did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Progress = Callable[[int, int], None]
"""Called with (pages done, pages to do) during a build."""
NAMED = 5
"""Page ids that a summary spells out."""


@dataclass
class BuildReport:
    """Counts are of pages."""

    retriever: str
    corpus: str
    path: str
    page_count: int
    generation: int = 0
    """0 for an index without generations."""
    encoded: int = 0
    """Pages whose vectors were computed in this build."""
    reused: int = 0
    """Pages whose vectors were there: from the generation before, an unfinished build, or an equal page."""
    removed: int = 0
    """Pages of the generation before that are gone, or have changed."""
    empty: list[str] = field(default_factory=list)
    """Pages without a vector, or of zeros only: no search finds them."""
    duplicates: list[list[str]] = field(default_factory=list)
    """Groups of pages with equal vectors, which no query tells apart."""
    truncated: int = 0
    """Pages encoded in this build whose text or image was cut to what the encoder takes."""
    seconds: float = 0.0
    bytes_on_disk: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def pages_per_second(self) -> float:
        """Encoded pages a second of the whole build; 0 when none was encoded."""
        return self.encoded / self.seconds if self.seconds else 0.0

    def summary(self) -> str:
        """What a person wants to know, a line each."""
        lines = [f"{self.page_count} pages indexed with {self.retriever} in {self.path}"]
        if self.generation:
            speed = f" at {self.pages_per_second:.1f} pages/s" if self.encoded else ""
            lines.append(
                f"generation {self.generation}: {self.encoded} encoded{speed}, {self.reused} reused, "
                f"{self.removed} removed; {self.bytes_on_disk / 1e6:.1f} MB"
            )
        if self.empty:
            lines.append(f"{len(self.empty)} pages have nothing to match: {_named(self.empty)}")
        if self.duplicates:
            same = sum(map(len, self.duplicates))
            groups = "; ".join(" = ".join(_some(group)) for group in self.duplicates[:NAMED])
            lines.append(f"{same} pages have the vectors of another page: {groups}" + _more(self.duplicates))
        if self.truncated:
            lines.append(f"{self.truncated} pages are longer than the encoder takes; their ends were cut")
        return "\n".join([*lines, *self.notes])


def _some(names: list[str]) -> list[str]:
    return names[:NAMED] + (["…"] if len(names) > NAMED else [])


def _more(items: list) -> str:
    return f"; and {len(items) - NAMED} more groups" if len(items) > NAMED else ""


def _named(page_ids: list[str]) -> str:
    return ", ".join(_some(page_ids))
