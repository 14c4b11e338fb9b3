"""Turns as plain text for the terminal."""

from __future__ import annotations

from visor.types import (
    Answer,
    Crop,
    Invalid,
    Observation,
    ObservationKind,
    Search,
    Summary,
    Trajectory,
    Turn,
)


def turn_text(turn: Turn) -> str:
    """Thought, action and observation of one turn."""
    images = sum(len(message.images) for message in turn.context)
    asked = f"{images} images in context, {turn.completion.seconds:.1f} s"
    lines = [f"── turn {turn.index + 1}  ({'by the system' if turn.by_system else asked})"]
    if turn.think:
        lines.append(f"   {printable(turn.think)}")
    lines.append(f"   {_action(turn)}" + "".join(f"  [{flag}]" for flag in turn.flags))
    if turn.observation:
        lines.append(f"   → {_observation(turn.observation)}")
    return "\n".join(lines)


def ending_text(trajectory: Trajectory) -> str:
    """The answer with the pages it was read from, or why there is none."""
    pages = trajectory.shown_page_ids
    lines = []
    if trajectory.error:
        error = trajectory.error
        lines.append(printable(f"no answer: {error.source} fault, {error.type}: {error.message}"))
    elif trajectory.answer is None:
        lines.append(f"no answer: stopped by {trajectory.stop_reason}")
    else:
        lines.append(f"answer: {printable(trajectory.answer) or '(empty)'}")
    lines.append("pages:  " + (", ".join(map(printable, pages)) or "none"))
    return "\n".join(lines)


def printable(text: str) -> str:
    """`text` on one line, with control characters shown as escapes: a reply must not steer the terminal."""
    joined = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in joined)


def _action(turn: Turn) -> str:
    match turn.action:
        case Search():
            kind = "verify" if turn.is_verification else "search"
            return f"{kind}: {printable(turn.query or turn.action.query)}"
        case Crop(box=box, space=space):
            return f"crop: {', '.join(f'{side:g}' for side in box)} ({space})"
        case Answer(text=text):
            return f"answer: {printable(text)}"
        case Summary(text=text, memorised=memorised):
            kept = ", ".join(f"{printable(item.page_id)} ({item.priority})" for item in memorised)
            return f"summary: {printable(text)}" + (f"  [keeps {kept}]" if kept else "")
        case Invalid(reason=reason):
            return f"invalid: {printable(reason)}"


def _observation(observation: Observation) -> str:
    label = ", ".join(map(printable, observation.page_ids)) or observation.kind.value.replace("_", " ")
    if observation.kind == ObservationKind.CROP:
        label += f" {list(observation.crop or ())}"
    return label + (" (last turn: answer now)" if observation.forced_answer else "")
