"""What the form of a trajectory counts: VISOR's penalty (section 3.3) and VRAG-RL's format reward."""

from __future__ import annotations

from visor.types import Invalid, Trajectory


def format_penalty(searches: int) -> int:
    """I_format: 1 when the trajectory has no search, else 0.

    An answer ends its episode, so no search at all and no search before the answer are the same. Defects of
    single replies (`Turn.format_ok`) do not count here, nor does a missing answer.
    """
    return int(searches == 0)


def is_well_formed(trajectory: Trajectory) -> bool:
    """The format check of the `vrag` reward: a non-empty answer was given, by replies that each held one
    thinking part and one valid action and nothing else."""
    answered = bool((trajectory.answer or "").strip())
    return answered and all(
        turn.format_ok and not isinstance(turn.action, Invalid) for turn in trajectory.turns
    )
