"""What vLLM's workers learn from this project: taking new weights while they run.

Named in `worker_extension_cls`; vLLM adds the methods to its worker class, in each worker's process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from visor.models.weight_files import WeightFiles

if TYPE_CHECKING:
    import torch


class WeightLoader:
    """Mixed into vLLM's worker."""

    reload_weights: Any
    """vLLM's own: takes weights under Hugging Face names, and fuses, shards and packs them anew."""

    def load_named_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace the weights of this worker by all weights of a model."""
        self.reload_weights(weights_iterator=weights)

    def load_weight_files(self, paths: Sequence[str]) -> None:
        """The same from safetensors files, of which each worker takes its shard."""
        self.load_named_weights(WeightFiles(paths))
