"""Qwen3-VL-Embedding checkpoints: page images and text queries, one vector each (Li et al. 2026).

An input is a chat of a system turn with the instruction and a user turn with the picture or the text; its
vector is the last layer's state at the last token, `<|im_start|>assistant\\n` included, made a unit vector.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from visor.retrieval.encoding import EncoderIdentity, PageVectors, QueryVectors
from visor.retrieval.weights import model_folder, settings_hash, weights_hash
from visor.types import Page, PageStore

if TYPE_CHECKING:
    from PIL.Image import Image

PAGE_INSTRUCTION = "Represent the user's input."
QUERY_INSTRUCTION = "Retrieve images or text relevant to the user's query."
"""The two instructions of the checkpoints' own examples."""
MIN_PIXELS, MAX_PIXELS = 4096, 1_843_200
"""Of a page image as the model sees it: at most 1,800 visual tokens of 32 × 32 pixels."""
MAX_TOKENS = 8192


class Qwen3VLEncoder:
    """Reads page images. A large image is scaled down to `max_pixels`; nothing is cut."""

    truncated = 0

    def __init__(self, model: str, device: str | None = None, max_pixels: int = MAX_PIXELS):
        """`model`: a folder or a hub name. ValueError when it holds no Qwen3-VL or lacks weights."""
        folder, revision = model_folder(model)
        _check_model_type(model, folder)
        import torch
        from transformers import AutoTokenizer, Qwen3VLModel
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
            self._images: Any = Qwen2VLImageProcessorPil.from_pretrained(folder)
            loaded: Any = Qwen3VLModel.from_pretrained(folder, dtype="auto", output_loading_info=True)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise ValueError(f"{model} is no Qwen3-VL checkpoint: {error}") from error
        network, loading = loaded
        if loading["missing_keys"]:
            names = sorted(loading["missing_keys"])
            raise ValueError(
                f"{model} lacks {len(names)} of the model's weights ({', '.join(names[:3])}, …); what would "
                "stand in for them is random"
            )
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._model = network.eval().to(self._device)
        self._max_pixels = max_pixels
        self._pad = self._tokenizer.pad_token_id or 0
        self.identity = EncoderIdentity(
            name=model if revision else Path(model).resolve().name,
            kind="single",
            dimension=network.config.text_config.hidden_size,
            pooling="last",
            revision=revision,
            weights_hash=weights_hash(folder),
            processor_hash=settings_hash(folder, PAGE_INSTRUCTION, QUERY_INSTRUCTION),
            dtype=str(network.dtype).removeprefix("torch."),
            max_visual_tokens=max_pixels // self._pixels_per_token(),
            reads="image",
        )

    def encode_queries(self, texts: Sequence[str]) -> list[QueryVectors]:
        """A query above 8,192 tokens is cut at its end."""
        if not texts:
            return []
        head, tail = self._frame(QUERY_INSTRUCTION)
        room = MAX_TOKENS - len(head) - len(tail)
        # A query that spells a special token is text, not that token.
        ids = [
            self._tokenizer(text.strip(), add_special_tokens=False, split_special_tokens=True)["input_ids"]
            for text in texts
        ]
        vectors_QD = self._encode([head + (query or self._ids("NULL"))[:room] + tail for query in ids])
        return [QueryVectors(vector[None]) for vector in vectors_QD]

    def encode_pages(self, pages: Sequence[Page], store: PageStore) -> list[PageVectors]:
        vectors_PD = self.encode_images([store.image(page.page_id) for page in pages])
        return [PageVectors(vector[None]) for vector in vectors_PD]

    def encode_images(self, images: Sequence[Image]) -> np.ndarray:
        """Unit vectors (images, dimension), float32."""
        inputs = self._images(
            images=list(images),
            size={"shortest_edge": MIN_PIXELS, "longest_edge": self._max_pixels},
            return_tensors="pt",
        )
        head, tail = self._frame(PAGE_INSTRUCTION)
        merge = self._images.merge_size**2
        pads = [self._ids("<|image_pad|>") * (int(grid.prod()) // merge) for grid in inputs["image_grid_thw"]]
        start, end = self._ids("<|vision_start|>"), self._ids("<|vision_end|>")
        return self._encode([head + start + pad + end + tail for pad in pads], **inputs)

    def libraries(self) -> dict[str, str]:
        return {name: version(name) for name in ("transformers", "torch")}

    def _encode(self, ids: Sequence[list[int]], **images) -> np.ndarray:
        """The normalised state at the last token of each sequence; padding stands behind it and is masked."""
        import torch

        length = max(map(len, ids))
        tokens = torch.tensor([row + [self._pad] * (length - len(row)) for row in ids])
        mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in ids])
        is_image = ((tokens == self._model.config.image_token_id) & (mask == 1)).int()
        with torch.inference_mode():
            states = self._model(
                input_ids=tokens.to(self._device),
                attention_mask=mask.to(self._device),
                mm_token_type_ids=is_image.to(self._device),
                use_cache=False,
                **{name: value.to(self._device) for name, value in images.items()},
            ).last_hidden_state
            last = states[torch.arange(len(ids)), mask.sum(1) - 1].float()
            return torch.nn.functional.normalize(last, dim=-1).cpu().numpy()

    def _frame(self, instruction: str) -> tuple[list[int], list[int]]:
        """Ids before and after the content of the user turn."""
        head = f"<|im_start|>system\n{instruction}<|im_end|>\n<|im_start|>user\n"
        return self._ids(head), self._ids("<|im_end|>\n<|im_start|>assistant\n")

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _pixels_per_token(self) -> int:
        return (self._images.patch_size * self._images.merge_size) ** 2


def _check_model_type(model: str, folder: Path) -> None:
    """Before loading: another model's weights would leave a whole Qwen3-VL to be made at random."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if config.get("model_type") != "qwen3_vl":
        raise ValueError(
            f"{model} is no Qwen3-VL checkpoint: its config.json is of model type "
            f"{config.get('model_type')!r}"
        )
