"""Log-probabilities straight from the output layer, so that the logits of a long row never stand whole.

n = scored tokens, H = hidden size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from visor.models.loading import unwrap

LOGIT_BYTES = 1 << 28
"""Bytes of float32 logits up to which the tokens of a pass are scored at once, and of one chunk above. The
backward pass computes the logits of a chunk again instead of keeping them."""


def tokens_at_once(vocabulary: int) -> int:
    """Tokens of one chunk."""
    return max(1, LOGIT_BYTES // (4 * vocabulary))


@contextmanager
def scoring(model, predicting: torch.Tensor, targets: torch.Tensor, entropy: bool) -> Iterator[None]:
    """Inside, the output layer of `model` gives scores where it otherwise gives logits: (n, 1) float32 with
    the log-probability of each of the `targets` (n,), or (n, 2) with the entropy beside it, at the positions
    that are true in `predicting` (B, L).

    It happens within the model's own forward pass, so that wrapped models (DDP, DeepSpeed, PEFT) and autocast
    see nothing new.
    """
    head = unwrap(model).lm_head
    replaced = head.__dict__.get("forward")  # of a library that has put its own in place
    layer = head.forward
    score = partial(_score, layer, entropy=entropy)
    head.forward = lambda hidden: _in_chunks(
        score, hidden[predicting], targets, tokens_at_once(head.out_features)
    )
    try:
        yield
    finally:
        del head.forward
        if replaced is not None:
            head.forward = replaced


def _in_chunks(
    score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    size: int,
) -> torch.Tensor:
    if len(hidden) <= size:
        return score(hidden, targets)
    number = -(-len(hidden) // size)
    parts = zip(hidden.tensor_split(number), targets.tensor_split(number))
    if not torch.is_grad_enabled():
        return torch.cat([score(*part) for part in parts])
    again = partial(checkpoint, score, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([again(*part) for part in parts])


def _score(layer, hidden: torch.Tensor, targets: torch.Tensor, *, entropy: bool) -> torch.Tensor:
    """(n, 1 or 2) scores of (n, H) hidden states."""
    logits = layer(hidden).float()
    chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
    log_normaliser = logits.logsumexp(-1)
    logprobs = chosen - log_normaliser
    if not entropy:
        return logprobs[:, None]
    with torch.no_grad():
        expected = (torch.softmax(logits, -1) * logits).sum(-1)
        spread = log_normaliser - expected
    return torch.stack([logprobs, spread], -1)
