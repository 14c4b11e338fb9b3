"""What an ingest is doing and what it did, for people."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from visor.wording import counted


@dataclass(frozen=True)
class Progress:
    """How far an ingest is."""

    stage: str
    """ "render", "read" for OCR, or "unpack" for pages that are taken out of a data set's rows."""
    documents_done: int
    documents: int
    """To do in this stage."""
    pages_done: int
    pages: int
    """To do in this stage; estimated by file size for documents that were not opened yet."""
    doc_id: str
    """The document that the last finished pages belong to."""


OnProgress = Callable[[Progress], None]
"""Called after every few pages."""


@dataclass
class IngestReport:
    """What an ingest did."""

    new: list[str] = field(default_factory=list)
    """Ids of documents rendered in this run."""
    unchanged: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Document id → reason."""
    notes: list[str] = field(default_factory=list)
    """Pages rendered at a lower dpi or left out, of the documents of this run; OCR that did not work."""
    read: int = 0
    """Pages that OCR read in this run."""
    pages: int = 0
    """Pages in the corpus."""
    pages_without_text: int = 0
    """Of these, pages that text retrieval cannot find."""
    pages_not_read: int = 0
    """Of these, pages that OCR could still read."""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """True when at least one of the given documents is in the corpus."""
        return bool(self.new or self.unchanged)

    def summary(self) -> str:
        """The outcome in lines, every failure named."""
        lines = [
            f"{len(self.new)} ingested, {len(self.unchanged)} unchanged, {len(self.removed)} removed, "
            f"{len(self.failed)} failed; {counted(self.pages, 'page')} in the corpus ({self.seconds:.1f} s)"
        ]
        if self.read:
            lines.append(f"{counted(self.read, 'page')} read by OCR")
        lines += [f"note: {note}" for note in self.notes]
        if self.pages_without_text:
            pages = counted(self.pages_without_text, "page has", "pages have")
            which = "it" if self.pages_without_text == 1 else "them"
            line = f"note: {pages} no text; text retrieval cannot find {which}"
            if self.pages_not_read:
                unread = counted(self.pages_not_read, "was", "were")
                line += f" ({unread} not read by OCR: --ocr on, extra `ocr`)"
            lines.append(line)
        lines += [f"failed: {doc_id}: {reason}" for doc_id, reason in self.failed.items()]
        return "\n".join(lines)
