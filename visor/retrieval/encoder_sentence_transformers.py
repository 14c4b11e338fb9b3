"""Any sentence-transformers model over page texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from visor.retrieval.encoders import missing_extra, page_text
from visor.retrieval.encoding import EncoderIdentity, PageVectors, QueryVectors
from visor.retrieval.weights import model_folder, settings_hash, weights_hash
from visor.types import Page, PageStore


class SentenceTransformerEncoder:
    """Queries and pages get the prompts of the model's own configuration. Vectors are made unit vectors,
    unless the model compares by plain dot product. A text above the model's limit is cut at its end and
    counted in `truncated`; a page without text has no vector."""

    def __init__(self, model: str, device: str | None = None):
        """`model`: a folder or a hub name. ValueError when it is not there, or the package is absent."""
        folder, revision = model_folder(model)
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError:
            raise missing_extra("sentence-transformers", "dense") from None
        try:
            self._model = SentenceTransformer(str(folder), device=device, local_files_only=True)
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"{model} is no sentence-transformers model: {error}") from error
        self._unit = self._model.similarity_fn_name != "dot"
        self.truncated = 0
        named = "get_embedding_dimension"  # since 6
        dimension = getattr(self._model, named, self._model.get_sentence_embedding_dimension)()
        assert dimension is not None
        first = next(iter(self._model.parameters()), None)
        settings = {
            "prompts": self._model.prompts,
            "max_seq_length": self._model.max_seq_length,
            "unit": self._unit,
        }
        self.identity = EncoderIdentity(
            name=model if revision else Path(model).resolve().name,
            kind="single",
            dimension=int(dimension),
            pooling=_pooling(self._model),
            revision=revision,
            weights_hash=weights_hash(folder),
            processor_hash=settings_hash(folder, json.dumps(settings, sort_keys=True)),
            dtype=str(first.dtype).removeprefix("torch.") if first is not None else "float32",
        )

    def encode_queries(self, texts: Sequence[str]) -> list[QueryVectors]:
        if not texts:
            return []
        vectors_QD = self._model.encode_query(
            list(texts), normalize_embeddings=self._unit, convert_to_numpy=True, show_progress_bar=False
        )
        return [QueryVectors(np.asarray(vector, np.float32)[None]) for vector in vectors_QD]

    def encode_pages(self, pages: Sequence[Page], store: PageStore) -> list[PageVectors]:
        texts = [page_text(page) for page in pages]
        present = [text for text in texts if text]
        self.truncated += sum(map(self._is_too_long, present))
        vectors_PD = self._model.encode_document(
            present,
            batch_size=len(present) or 1,
            normalize_embeddings=self._unit,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        vectors = iter(np.asarray(vectors_PD, np.float32))
        nothing = np.zeros((0, self.identity.dimension), np.float32)
        return [PageVectors(next(vectors)[None] if text else nothing) for text in texts]

    def libraries(self) -> dict[str, str]:
        return {name: version(name) for name in ("sentence-transformers", "transformers", "torch")}

    def _is_too_long(self, text: str) -> bool:
        limit, tokenizer = self._model.max_seq_length, getattr(self._model, "tokenizer", None)
        if limit is None or not callable(tokenizer):
            return False
        return len(tokenizer(text, truncation=False, verbose=False)["input_ids"]) > limit


def _pooling(model) -> str:
    """The pooling of the model's modules, as their settings name it."""
    for module in model:
        if type(module).__name__ == "Pooling":
            mode = module.get_config_dict().get("pooling_mode")
            return str(mode) if mode else module.get_pooling_mode_str()
    return type(model[-1]).__name__
