"""Texts and images of pages, served only when asked for with --with-pages.

A page id is looked up in the corpus and never used as a path. What the corpus names as the page's image is
served only when it is an image file inside the corpus folder, links followed.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse, Response

from visor.retrieval.service.exchange import reply
from visor.retrieval.service.limits import Refused
from visor.types import Page, PageStore

IMAGE_TYPES = {".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".png": "image/png", ".webp": "image/webp"}
TEXT_FIELDS = {"page_id", "doc_id", "page_number", "width", "height", "text", "caption", "sha256"}


def add_page_endpoints(app: FastAPI, corpus: PageStore, with_pages: bool) -> None:
    """`GET /v1/pages/{page_id}` and `…/image`; 404 for each when `with_pages` is off."""

    def find(page_id: str) -> Page:
        if not with_pages:
            raise Refused(404, "this service gives no pages; start it with --with-pages to have them.")
        try:
            return corpus.page(page_id)
        except ValueError:
            raise Refused(404, f"the corpus has no page {page_id!r}.") from None

    @app.get("/v1/pages/{page_id:path}/image")
    async def image(page_id: str) -> Response:
        page = find(page_id)
        path = image_path(corpus, page)
        return FileResponse(path, media_type=IMAGE_TYPES[path.suffix.lower()])

    @app.get("/v1/pages/{page_id:path}")
    async def text(page_id: str) -> Response:
        return reply(find(page_id).model_dump(include=TEXT_FIELDS))


def image_path(corpus: PageStore, page: Page) -> Path:
    """The page's image file. Raises Refused (404) when it is missing, no image, or outside the corpus."""
    folder = getattr(corpus, "path", None)
    if folder is None:
        raise Refused(404, "this corpus keeps no image files.")
    root = Path(folder).resolve()
    path = (root / page.image).resolve()
    if not path.is_relative_to(root) or path.suffix.lower() not in IMAGE_TYPES:
        raise Refused(404, f"the image of page {page.page_id!r} is not inside the corpus; it is not served.")
    if not path.is_file():
        raise Refused(
            404,
            f"the image of page {page.page_id!r} is missing; where documents were ingested after the start "
            "of this service, build the index again (visor index) and restart the service.",
        )
    return path
