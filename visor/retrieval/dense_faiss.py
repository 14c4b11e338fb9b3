"""FAISS indexes over the vectors of a store: flat, and what a factory string makes."""

from __future__ import annotations

from typing import Any

import numpy as np

from visor.retrieval.dense_vectors import DenseVectors
from visor.retrieval.encoders import missing_extra
from visor.retrieval.generations import VectorStore

FAISS_FILE = "faiss.index"
BLAS_QUERIES = 3
"""Queries from which a matrix product is faster than separate passes."""


def import_faiss() -> Any:
    """The module; ValueError when it is not installed."""
    try:
        import faiss
    except ImportError:
        raise missing_extra("faiss-cpu", "dense") from None
    return faiss


def flat_index(vectors: DenseVectors) -> Any:
    """Exact inner products."""
    faiss = import_faiss()
    index = faiss.IndexFlatIP(vectors.dimension)
    # Where FAISS turns from one pass over the vectors a query to a matrix product. Since 1.15 the setting, of
    # the whole process, counts queries × dimension, and by default 16 queries of 2,048 take 16 passes.
    faiss.cvar.distance_compute_blas_threshold = min(
        faiss.cvar.distance_compute_blas_threshold, BLAS_QUERIES * vectors.dimension
    )
    for block_PD in vectors.blocks():
        index.add(block_PD)
    return index


def empty_index(factory: str, dimension: int) -> Any:
    """An empty FAISS index of a factory string; ValueError when FAISS does not know it."""
    faiss = import_faiss()
    kind, _, parameters = factory.partition(";")
    try:
        index = faiss.index_factory(dimension, kind, faiss.METRIC_INNER_PRODUCT)
        if parameters:
            faiss.ParameterSpace().set_index_parameters(index, parameters)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise ValueError(f"FAISS makes no index {factory!r} of {dimension} dimensions: {reason}") from None
    return index


def fill_index(vectors: DenseVectors, factory: str) -> Any:
    """An index of a factory string over all vectors; ValueError when they are too few to train it."""
    index = empty_index(factory, vectors.dimension)
    everything = np.concatenate([*vectors.blocks(), np.zeros((0, vectors.dimension), np.float32)])
    try:
        index.train(everything)
        index.add(everything)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise ValueError(
            f"FAISS cannot fill an index {factory!r} with {len(everything)} vectors: {reason}"
        ) from None
    return index


def read_index(store: VectorStore) -> Any:
    """The approximate index of a generation; None when it has none."""
    if not store.manifest.settings.get("faiss_factory"):
        return None
    try:
        (name,) = [name for name in store.manifest.files if name.endswith(FAISS_FILE)]
        return import_faiss().read_index(str(store.path / name))
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"the index {store.path} is damaged: its FAISS file cannot be read ({error})"
        ) from None
