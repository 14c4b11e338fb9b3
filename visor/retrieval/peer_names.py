"""Page ids ↔ the image names of the peers' search servers (VRAG-RL, ViDoRAG, VISOR's public code).

They keep page 3 of `name.pdf` as `name_3.jpg`, in one flat folder, and know a page by that name.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from visor.types import Page, PageStore
from visor.wording import counted

IMAGE_SUFFIX = re.compile(r"\.(?:jpe?g|png|webp|bmp|gif|tiff?)$", re.IGNORECASE)
PDF_SUFFIX = re.compile(r"\.pdf$", re.IGNORECASE)


class PeerNames:
    """The pages of a corpus by the peers' names. Raises ValueError naming the names that mean two pages.

    Page n of `folder/name.pdf` is `name_n`. A document that is itself an image is its own name. The peers cut
    a file name at its first `.pdf`, so `a.pdf.v2.pdf` is known as `a` too, as their server would call it.
    """

    def __init__(self, pages: Iterable[Page]):
        self._names: dict[str, str] = {}
        """Page id → name, without suffix."""
        self._pages: dict[str, str] = {}
        ambiguous: dict[str, set[str]] = {}
        for page in pages:
            names = _names(page)
            self._names[page.page_id] = names[0]
            for name in names:
                other = self._pages.setdefault(name, page.page_id)
                if other != page.page_id:
                    ambiguous.setdefault(name, {other}).add(page.page_id)
        if ambiguous:
            shown = [f"{name!r} ({', '.join(sorted(ids))})" for name, ids in list(ambiguous.items())[:3]]
            names_mean = counted(len(ambiguous), "name means", "names mean")
            raise ValueError(
                f"the peers' protocol knows a page by its image's name, and {names_mean} more than one "
                f"page of this corpus: {'; '.join(shown)}{'; …' if len(ambiguous) > 3 else ''}. "
                "Rename the documents and ingest them again"
            )

    def name(self, page_id: str) -> str:
        """The peers' file name of a page, `name_3.jpg`; always .jpg, which is what their code cuts off."""
        return f"{self._names[page_id]}.jpg"

    def page_id(self, image_file: str) -> str | None:
        """The page of a peer's image path; None when the corpus has none of that name."""
        file_name = re.split(r"[\\/]", image_file)[-1]
        return self._pages.get(unicodedata.normalize("NFC", IMAGE_SUFFIX.sub("", file_name)))


class PeerImages:
    """Where a peer's agent finds the image of a page: it opens the file itself, on this machine."""

    def __init__(self, corpus: PageStore, folder: str | Path | None = None):
        """`folder`: fill it with links under the peers' names, so that their scores know the pages too; made
        when absent. Raises ValueError for ambiguous names and for a folder with other files in the way."""
        self._paths = {
            page.page_id: Path(getattr(corpus, "path", "."), page.image).resolve() for page in corpus.pages()
        }
        if folder is not None:
            names = PeerNames(corpus.pages())
            folder = Path(folder).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            for page_id, target in self._paths.items():
                self._paths[page_id] = _link(folder / names.name(page_id), target)

    def path(self, page_id: str) -> str:
        """Absolute path of the page's image."""
        return str(self._paths[page_id])


def _names(page: Page) -> list[str]:
    """The page's names, the one we give first."""
    file_name = unicodedata.normalize("NFC", page.doc_id.rpartition("/")[2])
    if IMAGE_SUFFIX.search(file_name):
        stem = IMAGE_SUFFIX.sub("", file_name)
        return [stem if page.page_number == 1 else f"{stem}_{page.page_number}"]
    names = [PDF_SUFFIX.sub("", file_name), file_name.split(".pdf")[0]]
    return list(dict.fromkeys(f"{name}_{page.page_number}" for name in names if name))


def _link(link: Path, target: Path) -> Path:
    if link.is_symlink():
        if link.readlink() == target:
            return link
        link.unlink()
    try:
        link.symlink_to(target)
    except FileExistsError:
        raise ValueError(f"{link} is a file and not a link; name an empty folder for the images") from None
    return link
