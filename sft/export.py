"""Trajectories → chat data, {messages, images} JSON lines, for other trainers; `sft.train` reads both.

python -m sft.export trajectories.jsonl -o chats.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from rollout.chats import write_chats
from rollout.trajectory_file import read_trajectories, refuse_own_input
from sft.command import explained
from visor.types import Message, Trajectory, text_message


def transcript(trajectory: Trajectory) -> list[Message]:
    """The whole conversation: prompt, every reply and every observation but one after the last reply."""
    messages = list(trajectory.prompt)
    for turn in trajectory.turns:
        messages.append(text_message("assistant", turn.completion.text))
        if turn.observation is not None:
            messages.append(turn.observation.message)
    return messages if messages[-1].role == "assistant" else messages[:-1]


def turn_transcripts(trajectory: Trajectory) -> Iterator[list[Message]]:
    """One conversation a turn: its context, evidence block and window included, and its reply."""
    for turn in trajectory.turns:
        yield [*turn.context, text_message("assistant", turn.completion.text)]


def export(
    trajectories: Iterable[Trajectory], output: str | Path, context: Literal["append", "episode"]
) -> int:
    """Write chat data; returns the number of rows. With `episode` only the last reply of a row is trained."""
    usable = (trajectory for trajectory in trajectories if trajectory.turns and not trajectory.error)
    if context == "append":
        return write_chats(output, (transcript(trajectory) for trajectory in usable))
    rows = (messages for trajectory in usable for messages in turn_transcripts(trajectory))
    return write_chats(output, rows, train_last_only=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m sft.export", description="Trajectories to chat data.")
    parser.add_argument("input", type=Path, help="JSON lines of trajectories, or a run folder")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument(
        "--context",
        choices=("append", "episode"),
        default="append",
        help="append: one row a trajectory; episode: one row a turn, with the context of that turn",
    )
    arguments = parser.parse_args(argv)
    with explained("sft.export"):
        refuse_own_input(arguments.input, arguments.output)
        count = export(read_trajectories(arguments.input), arguments.output, arguments.context)
    print(f"{count} rows written to {arguments.output}")


if __name__ == "__main__":
    main()
