"""Fewer vectors for a page: its vectors are clustered, and the mean of a cluster stands for its members.

After Clavié et al. 2024, "Reducing the footprint of multi-vector retrieval with minimal performance impact
via token pooling".

Axes in names: S page tokens, C clusters, D dimension.
"""

from __future__ import annotations

import numpy as np
import torch

ROUNDS = 8
"""Of k-means."""


def pool_tokens(vectors_SD: torch.Tensor, factor: int) -> np.ndarray:
    """Means of a page's clusters (C, D), float16, C at most ⌈S / factor⌉, at the mean norm of their members.

    The clusters are those of k-means by direction. Its first centres are spread evenly over the tokens, so
    equal pages pool equally.
    """
    tokens = len(vectors_SD)
    count = -(-tokens // factor)
    if count == tokens:
        return vectors_SD.numpy().astype("<f2")
    values_SD = vectors_SD.float()
    norms_S = torch.linalg.vector_norm(values_SD, dim=1)
    unit_SD = values_SD / norms_S.clamp_min(1e-30)[:, None]
    centres_CD = unit_SD[torch.linspace(0, tokens - 1, count).round().long()]
    nearest_S = torch.zeros(tokens, dtype=torch.long)
    for _ in range(ROUNDS):
        previous_S, nearest_S = nearest_S, torch.mm(unit_SD, centres_CD.t()).argmax(dim=1)
        sums_CD = torch.zeros_like(centres_CD).index_add_(0, nearest_S, unit_SD)
        length_C1 = torch.linalg.vector_norm(sums_CD, dim=1, keepdim=True)
        # A cluster without members, or whose members cancel out, keeps its centre.
        centres_CD = torch.where(length_C1 > 1e-6, sums_CD / length_C1.clamp_min(1e-6), centres_CD)
        if torch.equal(previous_S, nearest_S):
            break
    members_C = torch.bincount(nearest_S, minlength=count)
    norm_C = torch.zeros(count).index_add_(0, nearest_S, norms_S) / members_C.clamp_min(1)
    return (centres_CD * norm_C[:, None])[members_C > 0].numpy().astype("<f2")
