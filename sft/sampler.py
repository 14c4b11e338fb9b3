"""The order of the rows in an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler


class SortedStepsSampler(Sampler[int]):
    """Random order, with the rows of each optimizer step sorted by length, longest first.

    A step's rows, hence its gradient, are those of plain random order; but its micro-batches hold rows of
    similar length, so little of a padded batch is padding. The order of an epoch follows from (seed, epoch).
    """

    def __init__(self, lengths: Sequence[int], rows_per_step: int, seed: int) -> None:
        """`lengths` in tokens, one a row; `rows_per_step` over all micro-batches and processes."""
        self.lengths = list(lengths)
        self.rows_per_step = rows_per_step
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the dataloader at the start of an epoch, and when a run is resumed."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        for start in range(0, len(order), self.rows_per_step):
            step = order[start : start + self.rows_per_step]
            yield from sorted(step, key=lambda row: -self.lengths[row])
