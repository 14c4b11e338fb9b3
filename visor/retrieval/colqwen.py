"""ColQwen2.5 (Faysse et al. 2024) through colpali-engine: a page image becomes a vector for each token.

A model is a checkpoint, or a LoRA adapter, which names its base. The projection of the states to the vectors
(`custom_text_proj`) is no part of Qwen2.5-VL: where neither base nor adapter holds it, colpali-engine starts
it at random and answers nonsense; such a model is refused.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visor.retrieval.encoders import missing_extra
from visor.retrieval.encoding import EncoderIdentity, PageVectors, QueryVectors
from visor.retrieval.weights import model_folder, settings_hash, weights_hash
from visor.types import Page, PageStore

PROJECTION = ("custom_text_proj.weight", "custom_text_proj.bias")
ADAPTER_CONFIG, PROCESSOR_CONFIG = "adapter_config.json", "preprocessor_config.json"
PIXELS_PER_TOKEN = 28 * 28
NAMED = 3
"""Weights that an error spells out."""


class ColQwenEncoder:
    """Reads page images and text queries. A large image is scaled down to `max_visual_tokens`.

    Vectors have norm 1. A page's include those of the prompt around its image, as colpali-engine scores them;
    what a batch pads is dropped.
    """

    truncated = 0

    def __init__(
        self,
        model: str,
        device: str | None = None,
        dtype: str | None = None,
        max_visual_tokens: int | None = None,
    ):
        """`model`: folder or hub name of a checkpoint or adapter. `dtype`: None: bfloat16 on a GPU, float32
        elsewhere. `max_visual_tokens`: of a page; None: as the model's own processor says.

        ValueError when the model is not there, is no ColQwen2.5, or lacks weights, the projection above all.
        """
        try:
            from colpali_engine.models import ColQwen2_5_Processor
        except ImportError:
            raise missing_extra("colpali-engine with ColQwen2.5", "colqwen") from None
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        chosen = dtype or ("bfloat16" if self._device.type == "cuda" else "float32")
        if chosen not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"dtype is {chosen!r}; use bfloat16, float16 or float32")
        if max_visual_tokens is not None and max_visual_tokens < 4:
            raise ValueError(f"max_visual_tokens is {max_visual_tokens}; a page takes 4 or more")
        folder, revision = model_folder(model)
        base = _base_of(folder)
        self._model = _load(model, folder, base, getattr(torch, chosen)).to(self._device)
        processor_folder = folder if (folder / PROCESSOR_CONFIG).is_file() or base is None else base[1]
        limit = {} if max_visual_tokens is None else {"max_num_visual_tokens": max_visual_tokens}
        try:
            self._processor: Any = ColQwen2_5_Processor.from_pretrained(processor_folder, **limit)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{processor_folder}: the processor cannot be loaded: {error}") from error
        name = model if revision else Path(model).resolve().name
        weights = weights_hash(folder)
        if base is not None:
            name = f"{name} on {base[0]}"
            weights = hashlib.sha256(f"{weights} {weights_hash(base[1])}".encode()).hexdigest()
        self.identity = EncoderIdentity(
            name=name,
            kind="multi",
            dimension=self._model.custom_text_proj.out_features,
            pooling="none",
            revision=revision,
            weights_hash=weights,
            processor_hash=settings_hash(processor_folder, self._processor.visual_prompt_prefix),
            dtype=chosen,
            max_visual_tokens=int(self._processor.image_processor.size["longest_edge"]) // PIXELS_PER_TOKEN,
            reads="image",
        )

    def encode_queries(self, texts: Sequence[str]) -> list[QueryVectors]:
        """Each text with ten augmentation tokens behind it, as colpali-engine makes them."""
        if not texts:
            return []
        # A query that spells a special token is text, not that token.
        plain = [text.replace("<|", "< |") for text in texts]
        return [QueryVectors(rows) for rows in self._encode(self._processor.process_queries(plain))]

    def encode_pages(self, pages: Sequence[Page], store: PageStore) -> list[PageVectors]:
        if not pages:
            return []
        images = [store.image(page.page_id) for page in pages]
        return [PageVectors(rows) for rows in self._encode(self._processor.process_images(images))]

    def libraries(self) -> dict[str, str]:
        return {name: version(name) for name in ("colpali-engine", "transformers", "torch")}

    def _encode(self, batch) -> list[np.ndarray]:
        """(T, D) float32 of each member of a batch, without what pads it."""
        batch = batch.to(self._device)
        with torch.inference_mode():
            vectors_BTD = self._model(**batch).float().cpu()
        mask_BT = batch["attention_mask"].bool().cpu()
        return [vectors[mask].numpy() for vectors, mask in zip(vectors_BTD, mask_BT, strict=True)]


def _base_of(folder: Path) -> tuple[str, Path] | None:
    """Name and folder of the base model of an adapter; None for a whole checkpoint."""
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        return None
    name = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not name:
        raise ValueError(f"{file} names no base model")
    try:
        base, revision = model_folder(name)
    except ValueError as error:
        raise ValueError(f"{file}: the base model cannot be found: {error}") from None
    return (name if revision else base.resolve().name), base


def _load(model: str, folder: Path, base: tuple[str, Path] | None, dtype: torch.dtype):
    """The model, every weight of it from a file, in eval mode."""
    from colpali_engine.models import ColQwen2_5

    whole = folder if base is None else base[1]
    _check_type(whole)
    held = _tensor_names(whole)
    adapted = _tensor_names(folder) if base is not None else set()
    for name in PROJECTION:
        if not any(key == name or key.endswith(f".{name}") for key in held | adapted):
            where = f"{whole}" if base is None else f"neither the adapter {folder} nor its base {whole}"
            lacks = "lacks" if base is None else "holds"
            raise ValueError(
                f"{model} is no trained ColQwen2.5: {where} {lacks} {name} in its *.safetensors; the "
                "projection that would stand in for it is random. Name a ColQwen2.5 checkpoint or adapter"
            )
    try:
        network, loading = ColQwen2_5.from_pretrained(whole, dtype=dtype, output_loading_info=True)
        missing = {key for key in loading["missing_keys"] if not _in_adapter(key, adapted)}
        if not missing and base is not None:
            missing = _load_adapter(network, folder)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{model} cannot be loaded as ColQwen2.5: {error}") from error
    if missing:
        names = sorted(missing)
        more = ", …" if len(names) > NAMED else ""
        raise ValueError(
            f"{model} lacks {len(names)} of the model's weights ({', '.join(names[:NAMED])}{more}); what "
            "would stand in for them is random"
        )
    return network.eval()


def _load_adapter(network, folder: Path) -> set[str]:
    """Put an adapter onto its base; returns the names of the weights that its file lacks.

    ValueError when it holds weights that the model has no place for, which would be left out in silence.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    # Adapters made with older versions of Transformers name the layers otherwise.
    names = get_model_conversion_mapping(network, key_mapping=network._checkpoint_conversion_mapping)
    loaded = network.load_adapter(str(folder), weight_mapping=names)
    if not loaded.missing_keys and loaded.unexpected_keys:
        raise ValueError(f"the model has no place for {sorted(loaded.unexpected_keys)[0]} of {folder}")
    return _without_saved_whole(network, folder, set(loaded.missing_keys))


def _without_saved_whole(network, folder: Path, missing: set[str]) -> set[str]:
    """Fill in the weights of modules that an adapter saves whole (`modules_to_save`), which an older
    Transformers leaves out; returns the names that stay missing."""
    from safetensors.torch import load_file

    held = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    still = set()
    for key in missing:
        plain = key.replace(".modules_to_save.default.", ".")
        found = [tensor for name, tensor in held.items() if name.endswith(f".{plain}")]
        if plain == key or len(found) != 1:
            still.add(key)
        else:
            network.get_parameter(key).data.copy_(found[0])
    return still


def _in_adapter(key: str, adapted: set[str]) -> bool:
    return any(name.endswith(f".{key}") for name in adapted)


def _check_type(folder: Path) -> None:
    config = folder / "config.json"
    if not config.is_file():
        raise ValueError(f"{folder} has no config.json, so it is no model folder")
    model_type = json.loads(config.read_text(encoding="utf-8")).get("model_type")
    if model_type != "qwen2_5_vl":
        raise ValueError(f"{folder} holds a model of type {model_type!r}; ColQwen2.5 is of type 'qwen2_5_vl'")


def _tensor_names(folder: Path) -> set[str]:
    """Names of the tensors in a folder's safetensors files, from their headers (8 bytes of length, JSON).

    ValueError when the folder has none, or one is damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no *.safetensors file, so it holds no weights that can be checked")
    names: set[str] = set()
    for file in files:
        with file.open("rb") as stream:
            try:
                (length,) = struct.unpack("<Q", stream.read(8))
                names |= set(json.loads(stream.read(length))) - {"__metadata__"}
            except (struct.error, ValueError, MemoryError) as error:
                raise ValueError(f"{file} is damaged: {error}") from None
    return names
