"""The dynamic trajectory: which messages the policy sees at a call (VISOR section 3.2, eq. 2)."""

from __future__ import annotations

from collections.abc import Sequence

from visor.types import Message, TextPart, Turn, text_message


def first_in_window(n_turns: int, window: int | None) -> int:
    """0-based index of the oldest of `n_turns` turns that is still in the window; None keeps all."""
    return 0 if window is None else max(n_turns - window, 0)


def turn_messages(turn: Turn) -> list[Message]:
    """The policy's reply, with the ids as sampled where there are any, and the observation."""
    assert turn.observation is not None, "a turn without an observation ends its episode"
    reply = Message(
        role="assistant",
        content=[TextPart(text=turn.completion.text)],
        token_ids=turn.completion.token_ids,
    )
    return [reply, turn.observation.message]


def build_context(
    prompt: Sequence[Message], evidence: str, turns: Sequence[Turn], window: int | None
) -> list[Message]:
    """Return `[system; question; evidence; last W turns]`; no evidence message while the block is empty."""
    messages = list(prompt)
    if evidence:
        messages.append(text_message("user", evidence))
    for turn in turns[first_in_window(len(turns), window) :]:
        messages += turn_messages(turn)
    return messages
