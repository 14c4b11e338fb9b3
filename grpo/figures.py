"""Names of the figures that a training step and a validation have in common."""

from __future__ import annotations

from rollout.analyses.samples import sample_counts

SHARES = (
    "accuracy",
    "completeness",
    "no_verification_share",
    "verification_share",
    "over_search_share",
    "invalid_action_rate",
    "finish_rate",
    "mean_searches",
)
"""Taken from the evaluation's metrics, over all trajectories."""
FIGURES = ("reward", *SHARES)
LOWER_IS_BETTER = {"no_verification_share", "over_search_share", "invalid_action_rate", "mean_searches"}
OF_GOLD_PAGES = {"reward", "completeness", "no_verification_share", "verification_share", "over_search_share"}
"""The figures that exist only for questions with gold pages."""


def pass_figures(samples: int) -> dict[str, int]:
    """Name → k of the pass@k figures of a validation with so many samples a question; none with one sample,
    whose pass@1 is the accuracy."""
    return {f"pass_at_{k}": k for k in sample_counts(samples)} if samples > 1 else {}
