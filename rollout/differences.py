"""Where a replayed trajectory leaves its record: every field that the environment is answerable for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from visor.types import Record, Trajectory, Turn, messages_digest

TURN_FIELDS = (
    "think",
    "action",
    "format_ok",
    "flags",
    "is_verification",
    "query",
    "candidates",
    "observation",
)


class Difference(Record):
    """Where a replayed trajectory leaves its record."""

    trajectory: str
    """`question_id/sample_index`."""
    turn: int | None
    """0-based; None = about the trajectory as a whole."""
    field: str
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        place = self.trajectory if self.turn is None else f"{self.trajectory} turn {self.turn + 1}"
        return f"{place}: {self.field}: recorded {_short(self.recorded)}, now {_short(self.replayed)}"


def compare_trajectories(recorded: Trajectory, replayed: Trajectory) -> list[Difference]:
    """Name every difference that the environment is answerable for."""
    name = f"{recorded.question_id}/{recorded.sample_index}"
    found = [
        Difference(trajectory=name, turn=old.index, field=field, recorded=before, replayed=after)
        for old, new in zip(recorded.turns, replayed.turns, strict=False)
        for field, before, after in _turn_differences(old, new)
    ]
    whole: dict[str, tuple[Any, Any]] = {"prompt": (_digest(recorded.prompt), _digest(replayed.prompt))}
    if recorded.error is None:
        whole |= {
            "turns": (len(recorded.turns), len(replayed.turns)),
            "answer": (recorded.answer, replayed.answer),
            "stop_reason": (recorded.stop_reason, replayed.stop_reason),
        }
    for field, (before, after) in whole.items():
        if before != after:
            found.append(Difference(trajectory=name, turn=None, field=field, recorded=before, replayed=after))
    return found


def _turn_differences(old: Turn, new: Turn) -> list[tuple[str, Any, Any]]:
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    found = [(f, before[f], after[f]) for f in TURN_FIELDS if before[f] != after[f]]
    contexts = _digest(old.context), _digest(new.context)
    return ([("context", *contexts)] if contexts[0] != contexts[1] else []) + found


def _digest(messages: Sequence) -> str:
    return messages_digest(list(messages))[:16]


def _short(value: Any, limit: int = 160) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
