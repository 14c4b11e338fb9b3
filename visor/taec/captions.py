"""The text that stands for a page in the layer's decisions: its caption, else its text layer."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from visor.taec.text import occurs
from visor.types import PageStore


class Captions:
    """Captions of one corpus; one object serves all episodes over it."""

    def __init__(self, store: PageStore):
        self._store = store

    def text(self, page_id: str) -> str:
        """What the page is judged by."""
        page = self._store.page(page_id)
        return page.caption or page.text

    def kind(self, page_id: str) -> str:
        """What that text is: "caption", "page text" or "none"."""
        page = self._store.page(page_id)
        return "caption" if page.caption else "page text" if page.text else "none"

    @cached_property
    def longest(self) -> int:
        """Characters of the longest of all these texts; read once, when it is first needed."""
        return max((len(page.caption or page.text) for page in self._store.pages()), default=0)

    def support(self, page_id: str, slots: Collection[str]) -> float:
        """a_i, the share of the slots that occur in the page's text (TAEC, appendix A.3); 0 without slots."""
        text = self.text(page_id)
        return sum(occurs(slot, text) for slot in slots) / len(slots) if slots else 0.0
