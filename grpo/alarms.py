"""Alarms: what a run's figures look like when it goes wrong, from the metrics lines alone.

An alarm stands at a step when its condition held in each of the last `patience` steps. Nothing is remembered
beside the lines, which name the alarms that stood: the same lines give the same alarms, in a resumed run too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import Field

from visor.config import Config

Row = dict
"""A line of metrics.jsonl."""


class AlarmsConfig(Config):
    """Thresholds; null switches an alarm off."""

    patience: int = Field(10, ge=1)
    """Steps in a row that a condition must hold, for all but the KL."""
    entropy_fraction: float | None = Field(0.2, gt=0, lt=1)
    """entropy_collapse: entropy below this share of its mean over the first steps."""
    entropy_first_steps: int = Field(10, ge=1)
    """The steps of that mean."""
    kl: float | None = Field(1.0, gt=0)
    """kl_blow_up: KL above this, in nats a token; runs without a reference have none."""
    kl_patience: int = Field(3, ge=1)
    """Steps in a row of it; a single step may be one token's doing."""
    groups_dropped_share: float | None = Field(0.9, ge=0, lt=1)
    """no_reward_variance: share of a step's groups without a gradient above this."""
    over_search_share: float | None = Field(0.8, ge=0, lt=1)
    """over_searching: over_search_share above this."""
    invalid_action_rate: float | None = Field(0.5, ge=0, lt=1)
    """falling_format: invalid_action_rate above this."""


@dataclass(frozen=True)
class Alarm:
    name: str
    message: str
    """The figures, the threshold, the usual cause and what to try."""


ADVICE = {
    "entropy_collapse": (
        "the policy has become certain of its replies, so the samples of a group are alike",
        "a lower learning_rate, a higher temperature, epsilon_high above epsilon, or beta above 0",
    ),
    "kl_blow_up": (
        "the policy leaves the one it started from, by too large updates or by a few tokens that the "
        "reference finds very unlikely",
        "a lower learning_rate, a higher beta, a lower max_grad_norm, or kl_clamp",
    ),
    "no_reward_variance": (
        "the samples of a question all get the same reward: the questions are solved, or none of them is",
        "other questions, more num_generations, a higher temperature, or an end of the training",
    ),
    "over_searching": (
        "the policy goes on searching after it has seen all it needs",
        "waiting, when the reward rises meanwhile; a lower learning_rate, a lower episode.max_turns, or SFT "
        "data that stops in time",
    ),
    "falling_format": (
        "the replies lose their form: too large updates, replies cut at max_completion_length, or a starting "
        "policy that had not learned the actions",
        "a lower learning_rate, beta above 0, a longer max_completion_length, or more SFT first",
    ),
}  # fmt: skip
"""Alarm → (usual cause, what to try)."""
NAMES = tuple(ADVICE)


def standing(rows: Sequence[Row], settings: AlarmsConfig) -> list[Alarm]:
    """The alarms that stand at the last of a run's rows, which come in step order. A figure that is missing
    or None never meets a condition."""
    base = _first_entropy(rows, settings)
    floor = None if base is None or settings.entropy_fraction is None else settings.entropy_fraction * base
    later = rows[_first_steps_end(rows, settings) :]
    found = [
        _check("entropy_collapse", "entropy", _entropy, later, floor, settings.patience, below=True),
        _check("kl_blow_up", "kl", _figure("kl"), rows, settings.kl, settings.kl_patience),
        _check(
            "no_reward_variance", "share of groups without a gradient", _dropped, rows,
            settings.groups_dropped_share, settings.patience,
        ),
        _check(
            "over_searching", "over_search_share", _figure("over_search_share"), rows,
            settings.over_search_share, settings.patience,
        ),
        _check(
            "falling_format", "invalid_action_rate", _figure("invalid_action_rate"), rows,
            settings.invalid_action_rate, settings.patience,
        ),
    ]  # fmt: skip
    return [alarm for alarm in found if alarm]


def newly_raised(alarms: Sequence[Alarm], rows: Sequence[Row]) -> list[Alarm]:
    """Those of the last row's alarms that the row before does not name under `alarms`: what stood there was
    judged by the settings of its time, and an alarm that stricter ones raise is new."""
    before = rows[-2].get("alarms", []) if len(rows) > 1 else []
    return [alarm for alarm in alarms if alarm.name not in before]


def _check(
    name: str,
    label: str,
    value: Callable[[Row], float | None],
    rows: Sequence[Row],
    threshold: float | None,
    patience: int,
    below: bool = False,
) -> Alarm | None:
    last = [value(row) for row in rows[-patience:]]
    if threshold is None or len(last) < patience:
        return None
    values = [v for v in last if v is not None and (v < threshold if below else v > threshold)]
    if len(values) < len(last):
        return None
    cause, remedy = ADVICE[name]
    side = "below" if below else "above"
    spread = f"from {min(values):.4g} to {max(values):.4g}"
    return Alarm(
        name,
        f"alarm {name} at step {rows[-1]['step']}: {label} {values[-1]:.4g}, {side} {threshold:.4g} for "
        f"{patience} steps ({spread}). Usual cause: {cause}. Try: {remedy}.",
    )


def _figure(name: str) -> Callable[[Row], float | None]:
    return lambda row: row.get(name)


def _entropy(row: Row) -> float | None:
    """A step without a trained token has an entropy of 0, which means nothing."""
    return row.get("entropy") if row.get("trained_tokens") else None


def _dropped(row: Row) -> float | None:
    return row["groups_dropped"] / row["groups"] if row.get("groups") else None


def _first_steps_end(rows: Sequence[Row], settings: AlarmsConfig) -> int:
    """Number of rows up to the last of the first steps with an entropy."""
    known = [index for index, row in enumerate(rows) if _entropy(row) is not None]
    return (
        known[settings.entropy_first_steps - 1] + 1
        if len(known) >= settings.entropy_first_steps
        else len(rows)
    )


def _first_entropy(rows: Sequence[Row], settings: AlarmsConfig) -> float | None:
    values = [v for v in map(_entropy, rows[: _first_steps_end(rows, settings)]) if v is not None]
    return sum(values) / len(values) if values else None
