"""The GRPO loss under TRL's argument names.

B = rows of a micro-batch, L = tokens of its longest row. The weight of every row is fixed for a whole
optimizer update before any micro-batch is formed (`row_coefficients`), so neither micro-batch size nor
gradient accumulation nor the number of processes changes the loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LossType = Literal["dapo", "grpo", "bnpo", "dr_grpo"]
ImportanceSamplingLevel = Literal["token", "sequence"]


@dataclass(frozen=True)
class LossSettings:
    """Names and meanings as in TRL's GRPOConfig."""

    loss_type: LossType = "dapo"
    epsilon: float = 0.2
    """Lower clip: the ratio is kept above 1 − epsilon."""
    epsilon_high: float | None = None
    """Upper clip: the ratio is kept below 1 + epsilon_high; None = epsilon."""
    delta: float | None = None
    """Two-sided clip (INTELLECT-2, arXiv:2505.07291): the unclipped ratio is kept below this too, which
    bounds the loss of a token with a negative advantage; None = no bound. Above 1 + epsilon_high to be of
    use."""
    importance_sampling_level: ImportanceSamplingLevel = "token"
    """token: a ratio a token. sequence: one ratio a row, the geometric mean of its trained tokens' (GSPO,
    arXiv:2507.18071, eq. 7)."""
    beta: float = 0.0
    """Coefficient of the KL term to the reference model."""
    use_bias_correction_kl: bool = False
    """Multiply the KL of a token by its ratio. TRL does by default; the paper does not."""
    kl_clamp: float | None = None
    """Upper bound on the KL estimate of one token, which then has no KL gradient; None = no bound, as in TRL.
    exp(d) of one improbable token can outweigh a whole step; verl's low-variance KL is bounded at 10."""
    max_completion_length: int = 2048
    """Only `dr_grpo` uses it: the constant that stands for a trajectory's length."""


@dataclass
class LossStats:
    """Sums over trained tokens; divide by `tokens` after adding up the micro-batches of an update."""

    tokens: float = 0.0
    kl: float = 0.0
    clipped: float = 0.0
    """Tokens whose gradient the clip took away; at sequence level all tokens of a row or none."""
    entropy: float = 0.0
    """Of the policy's distribution at each token, nats."""

    def __add__(self, other: LossStats) -> LossStats:
        return LossStats(
            self.tokens + other.tokens,
            self.kl + other.kl,
            self.clipped + other.clipped,
            self.entropy + other.entropy,
        )

    def mean(self, total: float) -> float:
        """A sum divided by the number of tokens; 0 when nothing was trained."""
        return total / self.tokens if self.tokens else 0.0


def kl_to_reference(logprobs: Tensor, reference: Tensor) -> Tensor:
    """The low-variance KL per token, exp(d) − d − 1 with d = reference − logprobs (DeepSeekMath eq. 4).

    Non-negative and unbiased under the policy; 0 where the two agree. Shapes (B, L) → (B, L).
    """
    difference = reference - logprobs
    return torch.exp(difference) - difference - 1.0


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: str) -> Tensor:
    """π(token) / π_old(token), three (B, L) tensors → (B, L), or with `level="sequence"` (B, 1): the exponent
    of the row's mean log-ratio over the tokens of `mask` (GSPO eq. 7). A row without a token has ratio 1."""
    log_ratio = logprobs - old_logprobs
    if level == "sequence":
        log_ratio = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1.0)
    elif level != "token":
        raise ValueError(f"unknown importance_sampling_level {level!r}; use token or sequence")
    return torch.exp(log_ratio)


def token_losses(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    settings: LossSettings,
    reference: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (loss, kl, clipped) per token, each (B, L) (DeepSeekMath eq. 3, GSPO eq. 5).

    `logprobs`, `old_logprobs`, `reference` and `mask` are (B, L), `advantages` (B,); without a mask every
    token is trained, which matters at sequence level only. `kl` is 0 without a reference; `clipped` is 1.0
    where a clip took the gradient away. ValueError when beta is set without a reference.
    """
    if settings.beta and reference is None:
        raise ValueError("beta is not 0 but there are no reference log-probabilities; load a reference model")
    high = settings.epsilon if settings.epsilon_high is None else settings.epsilon_high
    advantage = advantages[:, None]
    mask = torch.ones_like(logprobs) if mask is None else mask
    ratio = importance_ratio(logprobs, old_logprobs, mask, settings.importance_sampling_level)
    clipped_ratio = ratio.clamp(1.0 - settings.epsilon, 1.0 + high)
    unclipped = ratio if settings.delta is None else ratio.clamp(max=settings.delta)
    loss = -torch.minimum(unclipped * advantage, clipped_ratio * advantage).expand_as(logprobs)
    kl = torch.zeros_like(logprobs) if reference is None else kl_to_reference(logprobs, reference)
    if settings.kl_clamp is not None:
        kl = kl.clamp(max=settings.kl_clamp)
    if settings.beta:
        loss = loss + settings.beta * (kl * ratio if settings.use_bias_correction_kl else kl)
    outside = ((ratio < 1.0 - settings.epsilon) & (advantage < 0)) | ((ratio > 1.0 + high) & (advantage > 0))
    if settings.delta is not None:
        outside = outside | ((ratio > settings.delta) & (advantage < 0))
    return loss, kl.detach(), outside.to(loss.dtype).expand_as(logprobs)


def row_coefficients(
    token_counts: Sequence[int],
    trajectories: Sequence[str],
    settings: LossSettings,
    *,
    excluded: Sequence[bool] | None = None,
    row_weights: Sequence[float] | None = None,
) -> list[float]:
    """Return what each row's summed token loss is multiplied by, given all rows of one optimizer update.

    `token_counts[i]` is the number of trained tokens of row i and `trajectories[i]` the trajectory it belongs
    to (several rows in turn mode). With N trained tokens in M trajectories:

    - dapo: 1 / N, the token mean (DAPO, arXiv:2503.14476, eq. 12);
    - bnpo: the same. TRL's divides by the tokens of each micro-batch, so that the result depends on the
      split; here the batch is the whole update;
    - grpo: 1 / (M · tokens of the row's trajectory), the mean of each trajectory's mean (DeepSeekMath eq. 3);
    - dr_grpo: 1 / (M · max_completion_length) (Dr. GRPO, arXiv:2503.20783).

    Rows marked in `excluded` (cut replies under `mask_truncated_completions`) get 0 and count nowhere.
    `row_weights` multiply the coefficients and do not change N or M.
    """
    keep = [count > 0 for count in token_counts]
    if excluded is not None:
        keep = [kept and not out for kept, out in zip(keep, excluded, strict=True)]
    tokens_of: Counter[str] = Counter()
    for kept, count, trajectory in zip(keep, token_counts, trajectories, strict=True):
        tokens_of[trajectory] += count if kept else 0
    total = sum(tokens_of.values())
    kept_trajectories = sum(1 for count in tokens_of.values() if count)

    def coefficient(trajectory: str) -> float:
        if settings.loss_type in ("dapo", "bnpo"):
            return 1.0 / total
        if settings.loss_type == "grpo":
            return 1.0 / (kept_trajectories * tokens_of[trajectory])
        if settings.loss_type == "dr_grpo":
            return 1.0 / (kept_trajectories * settings.max_completion_length)
        raise ValueError(f"unknown loss_type {settings.loss_type!r}; use dapo, grpo, bnpo or dr_grpo")

    weights = [1.0] * len(token_counts) if row_weights is None else row_weights
    return [
        weight * coefficient(trajectory) if kept else 0.0
        for kept, trajectory, weight in zip(keep, trajectories, weights, strict=True)
    ]


def weighted_loss(per_token: Tensor, mask: Tensor, coefficients: Tensor) -> Tensor:
    """Σ_rows coefficient · Σ_tokens mask · loss; two (B, L) tensors and `coefficients` (B,) → scalar."""
    return ((per_token * mask).sum(dim=-1) * coefficients).sum()


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    coefficients: Tensor,
    settings: LossSettings,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
) -> tuple[Tensor, LossStats]:
    """The loss of one micro-batch, to be summed over the micro-batches of an update, and its statistics.

    (B, L) tensors except `advantages` and `coefficients` (B,). Rows with coefficient 0 leave the statistics;
    `entropy` only enters them.
    """
    per_token, kl, clipped = token_losses(logprobs, old_logprobs, advantages, settings, reference, mask)
    counted = mask * (coefficients != 0)[:, None]
    entropy = torch.zeros_like(kl) if entropy is None else entropy
    stats = torch.stack([counted.sum(), *((x * counted).sum() for x in (kl, clipped, entropy))])
    return weighted_loss(per_token, mask, coefficients), LossStats(*stats.tolist())
