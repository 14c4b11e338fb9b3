"""Choosing the next token of each sequence of a batch, each with random numbers of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from visor.models.base import Request


class Sampler:
    """Samples token ids for the requests of one batch.

    Token number t of a request uses the t-th number of its own generator, seeded by the request, and inverts
    the cumulative distribution with it; what else is in the batch changes a sample only as far as it changes
    the rounding of its logits. `banned` is (V,) bool: ids that are never chosen.
    """

    def __init__(self, requests: Sequence[Request], banned: torch.Tensor):
        device = banned.device
        settings = [request.sampling for request in requests]
        self._banned = banned
        # Of 24 bits, so that a number times a total always stays below the total.
        uniforms = [
            np.random.Generator(np.random.PCG64(request.seed)).random(setting.max_tokens, dtype=np.float32)
            for request, setting in zip(requests, settings)
        ]
        longest = max(setting.max_tokens for setting in settings)
        padded = np.stack([np.pad(row, (0, longest - len(row))) for row in uniforms])
        self._uniforms = torch.from_numpy(padded).to(device)
        self._temperature = torch.tensor([setting.temperature for setting in settings], device=device)
        self._top_p = torch.tensor([setting.top_p for setting in settings], device=device)
        self._any_sampled = any(setting.temperature > 0 for setting in settings)
        self._any_top_p = any(setting.top_p < 1 for setting in settings)

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these rows of the batch only."""
        self._uniforms = self._uniforms[rows]
        self._temperature, self._top_p = self._temperature[rows], self._top_p[rows]

    def __call__(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        """(B,) chosen ids for (B, V) float32 logits, for token number `step` of each reply."""
        allowed = logits.masked_fill(self._banned, -torch.inf)
        greedy = allowed.argmax(-1)
        if not self._any_sampled:
            return greedy
        hot = self._temperature.clamp(min=1e-6)[:, None]
        probabilities = torch.softmax(allowed / hot, -1)
        if self._any_top_p:
            probabilities = nucleus(probabilities, self._top_p[:, None])
        chosen = invert_cdf(probabilities, self._uniforms[:, step])
        return torch.where(self._temperature > 0, chosen, greedy)


def nucleus(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zero what is outside the smallest set of likeliest tokens whose mass reaches `top_p` (Holtzman et al.
    2020, section 3.1). Not renormalised. `probabilities` (B, V), `top_p` (B, 1)."""
    ordered, order = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    mass_before = ordered.double().cumsum(-1) - ordered
    ordered = ordered.masked_fill((mass_before >= top_p) & (top_p < 1), 0.0)
    return torch.zeros_like(probabilities).scatter(-1, order, ordered)


def invert_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """(B,) index of the first entry whose cumulative weight exceeds u × total. `weights` (B, V) need not sum
    to 1; entries of weight 0 are never chosen. Sums in float64."""
    cumulative = weights.double().cumsum(-1)
    target = uniforms.double()[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)
