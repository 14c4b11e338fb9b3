"""Image features of references, each distinct image computed once and shared by whatever shows it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from visor.models.base import ImageSource
from visor.models.cache import LRUCache
from visor.models.loading import unwrap
from visor.models.rendering import ChatRenderer
from visor.models.tensors import Row, collate, to_device
from visor.types import ImageRef


class ImageFeatures:
    """Features from the vision tower and the projector of `model`, whose weights are read at each call.

    They are kept between calls, up to `cache_bytes`, while both are frozen, or when `keep` is true; call
    `clear` after loading other vision weights.
    """

    def __init__(
        self,
        model,
        renderer: ChatRenderer,
        images: ImageSource,
        *,
        keep: bool | None = None,
        cache_bytes: int = 1 << 30,
    ) -> None:
        self.model, self.renderer, self.images = model, renderer, images
        self._keep = keep
        self._kept: LRUCache[torch.Tensor] = LRUCache(cache_bytes, lambda tensor: tensor.nbytes)

    @property
    def frozen(self) -> bool:
        """Neither the vision tower nor the projector trains."""
        return not any(p.requires_grad for p in unwrap(self.model).model.visual.parameters())

    def clear(self) -> None:
        """Forget what is kept."""
        self._kept.clear()

    @torch.no_grad()
    def __call__(self, refs: Sequence[ImageRef]) -> list[torch.Tensor]:
        """(h·w / 4, hidden) features of each reference on the model's device, without gradient; those that
        have to be computed go through the vision tower in one pass."""
        keep = self.frozen if self._keep is None else self._keep
        distinct = {ref.key: ref for ref in refs}
        known: dict[tuple, torch.Tensor] = {}
        if keep:
            known = {key: kept for key in distinct if (kept := self._kept.peek(key)) is not None}
        missing = {key: ref for key, ref in distinct.items() if key not in known}
        if missing:
            known.update(zip(missing, self._compute(list(missing.values()))))
            if keep:
                for key in missing:
                    # A clone: the features of one pass are views of one tensor.
                    self._kept.get(key, known[key].clone)
        return [known[ref.key] for ref in refs]

    def _compute(self, refs: Sequence[ImageRef]) -> Sequence[torch.Tensor]:
        base = unwrap(self.model)
        device = next(base.parameters()).device
        pixels = [torch.from_numpy(self.renderer.pixels(ref, self.images)) for ref in refs]
        grids = torch.tensor([self.renderer.grid(ref, self.images) for ref in refs])
        return base.model.get_image_features(torch.cat(pixels).to(device), grids.to(device)).pooler_output


def collate_with_features(rows: Sequence[Row], features: ImageFeatures, device) -> dict[str, torch.Tensor]:
    """`collate` onto a device, with `image_features` (N · h·w / 4, hidden) in place of pixels: the vision
    tower has run, so that `forward_logprobs` of any model with the same one needs not."""
    batch = to_device(collate(rows, features.renderer, features.images, pixels=False), device)
    refs = [ref for row in rows for ref in row.images]
    if refs:
        batch["image_features"] = torch.cat(features(refs)).to(device)
    return batch


def same_vision(model, other) -> bool:
    """Whether two models have the same vision tower and projector to the bit, so that features serve both."""
    pairs = zip(unwrap(model).model.visual.parameters(), unwrap(other).model.visual.parameters(), strict=True)
    return all(one.dtype == two.dtype and torch.equal(one, two) for one, two in pairs)
