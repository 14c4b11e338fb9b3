"""Rows for supervised fine-tuning: a light index built at the start, each row built when it is first needed.

A row kept from its first use costs about 9 bytes a token; picture pixels are the renderer's business.
"""

from __future__ import annotations

import logging
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from rollout.chats import ChatImages, PixelBudget, chat_row, read_chats
from rollout.rows import RowTooLong, TrainingRow, trajectory_row, turn_rows
from sft.arguments import DataSource
from visor.models.rendering import ChatRenderer
from visor.models.smart_resize import FACTOR
from visor.types import Message, TextPart, Trajectory

logger = logging.getLogger(__name__)

BYTES_PER_TOKEN = 4
"""Of ordinary text; only the grouping by length uses it."""
TOKENS_PER_MESSAGE = 8
"""Upper bound on the ids of a message's frame."""

Build = Callable[[], TrainingRow]


@dataclass
class Entry:
    """Where a row comes from."""

    build: Build
    length: int
    """Estimated tokens."""
    bound: int
    """Tokens it cannot exceed."""
    name: str
    """The sample it comes from, for messages: file and row of a chat, question and sample of a trajectory."""


@dataclass
class _Packed:
    """A finished row in compact form."""

    row: TrainingRow
    input_ids: array
    loss_mask: bytes

    def unpack(self) -> TrainingRow:
        return replace(self.row, input_ids=self.input_ids.tolist(), loss_mask=list(self.loss_mask))


@dataclass
class RowCounts:
    """What became of the data; printed at the start of a run."""

    rows: int = 0
    left_out: Counter = field(default_factory=Counter)
    """Reason → rows or trajectories."""


class LazyRows:
    """A sequence of training rows. Indexing builds a row once and keeps it.

    `context` is `episode` (one row a turn, its own context) or `append` (one row a trajectory); chats are one
    row each. Rows over `max_length` are left out at the start.
    """

    def __init__(
        self,
        sources: Sequence[DataSource],
        renderer: ChatRenderer,
        images: ChatImages,
        *,
        context: str = "episode",
        max_length: int = 16384,
        budget: PixelBudget = (256 * FACTOR**2, 512 * FACTOR**2),
        seed: int = 0,
    ) -> None:
        self.renderer = renderer
        self.images = images
        self.max_length = max_length
        self.counts = RowCounts()
        self._kept: dict[int, _Packed] = {}
        self._entries: list[Entry] = []
        rng = random.Random(seed)
        for source in sources:
            entries = list(self._read(source, source.context or context, budget))
            if not entries:
                raise ValueError(f"{source.path} gives no row to train on ({dict(self.counts.left_out)})")
            self._entries += _weighted(entries, source.weight, rng)
        self.counts.rows = len(self._entries)

    @property
    def lengths(self) -> list[int]:
        """Estimated tokens of each row."""
        return [entry.length for entry in self._entries]

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> TrainingRow:
        """The row at `index`; where its picture is damaged, the next usable row, with a warning."""
        if not 0 <= index < len(self):
            raise IndexError(index)  # also what ends a loop over the rows
        for offset in range(len(self)):
            place = (index + offset) % len(self)
            key = id(self._entries[place])
            if key not in self._kept:
                try:
                    self._kept[key] = _pack(self._entries[place].build())
                except ValueError as error:
                    if isinstance(error, RowTooLong):
                        raise
                    logger.warning(
                        "row %d (%s) cannot be used, the next one takes its place: %s",
                        place,
                        self._entries[place].name,
                        error,
                    )
                    self.counts.left_out["unusable"] += 1
                    continue
            return self._kept[key].unpack()
        raise ValueError("no row of the data can be used; see the warnings above")

    # ------------------------------------------------------------ reading

    def _read(self, source: DataSource, context: str, budget: PixelBudget) -> Iterator[Entry]:
        if source.kind == "messages":
            entries = self._chat_entries(source.path, budget)
        else:
            entries = self._trajectory_entries(Path(source.path), context, source.train)
        for entry in entries:
            if entry.bound > self.max_length and not self._fits(entry):
                self.counts.left_out["over max_length"] += 1
                continue
            yield entry

    def _fits(self, entry: Entry) -> bool:
        try:
            row = entry.build()
        except RowTooLong:
            return False
        self.counts.left_out["turns cut off the end"] += row.turns_cut
        return len(row.input_ids) <= self.max_length

    def _chat_entries(self, path: str, budget: PixelBudget) -> Iterator[Entry]:
        for chat in read_chats(path, budget):
            build = partial(chat_row, chat, self.renderer, self.images, self.max_length)
            yield self._entry(chat.name, chat.messages, build)

    def _trajectory_entries(self, path: Path, context: str, train: Literal["all", "last"]) -> Iterator[Entry]:
        for place, trajectory in _scan(path):
            if trajectory.error or not trajectory.turns:
                self.counts.left_out["failed or empty trajectories"] += 1
                continue
            name = f"{trajectory.question_id}/{trajectory.sample_index}"
            if context == "append":
                messages = [*trajectory.prompt, *_transcript(trajectory)]
                yield self._entry(name, messages, partial(self._whole, place, train))
                continue
            turns = list(enumerate(trajectory.turns))
            for index, turn in turns if train == "all" else turns[-1:]:
                messages = [*turn.context, Message(role="assistant", content=[])]
                extra = len(turn.completion.token_ids or turn.completion.text.encode()) + 1
                yield self._entry(name, messages, partial(self._turn, place, index), extra)

    def _entry(self, name: str, messages: Sequence[Message], build: Build, extra: int = 0) -> Entry:
        text = sum(len(message.text.encode()) for message in messages)
        pictures = sum(ref.max_pixels // FACTOR**2 for message in messages for ref in message.images)
        frames = TOKENS_PER_MESSAGE * len(messages)
        length = pictures + (text + extra) // BYTES_PER_TOKEN
        return Entry(build, length, pictures + text + extra + frames, name)

    def _whole(self, place: _Place, train: Literal["all", "last"]) -> TrainingRow:
        return trajectory_row(_load(place), self.renderer, self.images, self.max_length, train=train)

    def _turn(self, place: _Place, index: int) -> TrainingRow:
        trajectory = _load(place)
        alone = trajectory.model_copy(update={"turns": [trajectory.turns[index]]})
        return turn_rows(alone, self.renderer, self.images)[0]


@dataclass(frozen=True)
class _Place:
    """A line of a file; the trajectory is parsed again when its row is built, so that memory stays small."""

    path: Path
    offset: int
    line: int


def _scan(path: Path) -> Iterator[tuple[_Place, Trajectory]]:
    offset = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                place = _Place(path, offset, number)
                yield place, _parse(line, place)
            offset += len(line)


def _load(place: _Place) -> Trajectory:
    with open(place.path, "rb") as file:
        file.seek(place.offset)
        return _parse(file.readline(), place)


def _parse(line: bytes, place: _Place) -> Trajectory:
    try:
        return Trajectory.model_validate_json(line)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise ValueError(
            f"{place.path} line {place.line} is not a trajectory: {where} {problem['msg']}"
        ) from None


def _transcript(trajectory: Trajectory) -> Iterator[Message]:
    for turn in trajectory.turns:
        yield Message(role="assistant", content=[TextPart(text=turn.completion.text)])
        if turn.observation is not None:
            yield turn.observation.message


def _weighted(entries: list[Entry], weight: float, rng: random.Random) -> list[Entry]:
    """Each entry `weight` times; the fraction is a random share of them."""
    whole, fraction = divmod(weight, 1)
    return entries * int(whole) + rng.sample(entries, round(fraction * len(entries)))


def _pack(row: TrainingRow) -> _Packed:
    return _Packed(
        replace(row, input_ids=[], loss_mask=[], old_logprobs=None),
        array("q", row.input_ids),
        bytes(row.loss_mask),
    )
