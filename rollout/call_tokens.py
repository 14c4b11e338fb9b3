"""Tokens of a trajectory's calls: as counted where something counted them, and by a rule of thumb anyway."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from visor.env.config import TOKEN_AREA
from visor.env.tokens import estimate_tokens
from visor.taec.requirements import SLOT_PROMPT
from visor.types import Message, TextPart, ToolCall, Trajectory, Turn


def token_fields(trajectory: Trajectory) -> dict[str, Any]:
    """The token fields of a result row; see there. A call that was not counted leaves the count None."""
    turns = [turn for turn in trajectory.turns if not turn.by_system]
    # Neutral text goes to the model and not into the recorded contexts.
    added = trajectory.meta.get("intervention", {}).get("pressure_tokens", 0)
    return {
        "new_tokens": _total([_reply_tokens(turn) for turn in turns]),
        "prompt_tokens": _total([_prompt_tokens(turn) for turn in turns]),
        "image_tokens": _total([_image_tokens(turn) for turn in turns]),
        "estimated_tokens": {
            "prompt_text": sum(estimate_tokens(_text(turn.context)) + added for turn in turns),
            "images": sum(_largest_image_tokens(turn) for turn in turns),
            "reply": sum(_estimated_reply(turn) for turn in turns),
        }
        | _slot_tokens(trajectory),
    }


def slot_calls(trajectory: Trajectory) -> int:
    """Model calls that the layer made for the slots of this very trajectory."""
    return int(_slots(trajectory).get("model_calls", 0))


def _slots(trajectory: Trajectory) -> dict[str, Any]:
    return trajectory.meta.get("evidence_policy", {}).get("slots", {})


def _slot_tokens(trajectory: Trajectory) -> dict[str, int]:
    """The slot call is no turn of the record: its prompt is known, its reply is taken to be the keywords."""
    calls = slot_calls(trajectory)
    if not calls:
        return {}
    reply = json.dumps(_slots(trajectory).get("keywords", []), ensure_ascii=False)
    return {
        "slot_prompt": calls * estimate_tokens(SLOT_PROMPT + trajectory.question),
        "slot_reply": calls * estimate_tokens(reply),
    }


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _reply_tokens(turn: Turn) -> int | None:
    ids = turn.completion.token_ids
    return turn.completion.completion_tokens if ids is None else len(ids)


def _prompt_tokens(turn: Turn) -> int | None:
    ids = turn.completion.prompt_token_ids
    return turn.completion.prompt_tokens if ids is None else len(ids)


def _image_tokens(turn: Turn) -> int | None:
    sizes = turn.completion.image_sizes
    if sizes is None:
        return None if any(message.images for message in turn.context) else 0
    return sum(width * height // TOKEN_AREA for width, height in sizes)


def _largest_image_tokens(turn: Turn) -> int:
    known = _image_tokens(turn)
    if known is not None:
        return known
    return sum(image.max_pixels // TOKEN_AREA for message in turn.context for image in message.images)


def _estimated_reply(turn: Turn) -> int:
    calls = "".join(call.name + call.arguments for call in turn.completion.tool_calls)
    return estimate_tokens(turn.completion.text + calls)


def _text(messages: Sequence[Message]) -> str:
    parts = []
    for message in messages:
        for part in message.content:
            if isinstance(part, TextPart):
                parts.append(part.text)
            elif isinstance(part, ToolCall):
                parts.append(part.name + part.arguments)
    return "\n".join(parts)
