"""Trajectory → training rows: one builder for SFT and GRPO."""

from __future__ import annotations

from dataclasses import dataclass, field

from visor.types import ImageRef


@dataclass
class TrainingRow:
    """One sequence to train on; L = its length in tokens, image pads expanded."""

    input_ids: list[int]
    """(L,) prompt and reply ids; sampled ids stand as they were sampled."""
    loss_mask: list[int]
    """(L,) 1 where the token was produced by the policy and is trained, else 0."""
    images: list[ImageRef] = field(default_factory=list)
    """In order of their pads in `input_ids`."""
    old_logprobs: list[float] | None = None
    """(L,) log-probability at sampling of each trained token, 0.0 elsewhere; None when there is none."""
    advantage: float = 0.0
    trajectory: str = ""
    """`question_id/sample_index` of the trajectory it comes from; named in error messages."""
    turn_index: int | None = None
    """The turn of a one-turn row; None for a row over the whole trajectory."""
    retokenised: bool = False
    """True when a reply came as text only and was tokenised here, once."""
