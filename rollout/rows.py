"""Trajectory → training rows: one builder for SFT and GRPO.

A row is built from messages whose replies carry their ids, so that what is trained is what was sampled. Every
row is checked before it is returned (`check_row`); a broken one names its trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from visor.models.base import ImageSource
from visor.models.rendering import ChatRenderer, Encoded, Span
from visor.types import Completion, FinishReason, ImageRef, Message, TextPart, Trajectory

Overflow = Literal["cut", "refuse"]
ROUNDING = 1e-3
"""How far above 0 a log-probability may be by an engine's rounding."""


class RowTooLong(ValueError):
    """A row exceeds the length limit, and cutting it is not allowed or would leave nothing to train."""


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
    image_spans: list[Span] = field(default_factory=list)
    """Where the pads of each image stand; pads outside were sampled by the policy and mean no image."""
    turns_cut: int = 0
    """Replies left out at the end because the row was over the length limit."""


def trajectory_row(
    trajectory: Trajectory,
    renderer: ChatRenderer,
    images: ImageSource,
    max_length: int | None = None,
    overflow: Overflow = "cut",
    train: Literal["all", "last"] = "all",
) -> TrainingRow:
    """One row over the whole uncompressed trajectory (VISOR, section 3.3): system, question, every reply and
    every observation as shown, without window and evidence block; loss on the sampled ids, of the last reply
    only with `train="last"` (a row cut before it then raises RowTooLong).

    The observation after the last reply is left out: nothing follows it. `old_logprobs` are those sampled
    under the window, another context than this row's: for measuring the gap, not for a ratio. A row over
    `max_length` tokens loses its last turns (`turns_cut` says how many) or, with `overflow="refuse"`, raises
    RowTooLong, as does one whose first reply does not fit. ValueError for a trajectory without turns.
    """
    name = _name(trajectory)
    if not trajectory.turns:
        raise ValueError(f"{name} has no turns, so there is nothing to train")
    replies = [_reply(turn.completion, renderer) for turn in trajectory.turns]
    messages = list(trajectory.prompt)
    for turn, reply in zip(trajectory.turns, replies):
        messages.append(reply.message)
        if turn.observation is not None:
            messages.append(turn.observation.message)
    if trajectory.turns[-1].observation is not None:
        messages.pop()
    encoded = renderer.encode(messages, images, add_generation_prompt=False)
    if train == "last":
        replies = replies[-1:]
    first = len(encoded.assistant_spans) - len(replies)
    encoded = _fit(encoded, messages, max_length, overflow, name, first)
    return _row(encoded, renderer, images, first, replies, name)


def turn_rows(trajectory: Trajectory, renderer: ChatRenderer, images: ImageSource) -> list[TrainingRow]:
    """One row a turn: the context it was sampled under and its reply, with the log-probabilities as sampled.

    The context is encoded again from its messages and must give the very ids the reply was sampled after
    (AssertionError naming the turn).
    """
    rows = []
    for turn in trajectory.turns:
        name = f"{_name(trajectory)} turn {turn.index}"
        reply = _reply(turn.completion, renderer)
        encoded = renderer.encode([*turn.context, reply.message], images, add_generation_prompt=False)
        prompt = turn.completion.prompt_token_ids
        start = encoded.assistant_spans[-1][0]
        assert prompt is None or encoded.input_ids[:start] == prompt, (
            f"{name}: its context encodes to other ids than the reply was sampled after"
        )
        row = _row(encoded, renderer, images, len(encoded.assistant_spans) - 1, [reply], name)
        row.trajectory, row.turn_index = _name(trajectory), turn.index
        rows.append(row)
    return rows


def messages_row(
    messages: Sequence[Message],
    renderer: ChatRenderer,
    images: ImageSource,
    train: Literal["assistant", "last"] = "assistant",
    max_length: int | None = None,
    overflow: Overflow = "cut",
    name: str = "",
) -> TrainingRow:
    """A row of plain chat data, for SFT: loss on every assistant message, or on the last one only.

    Replies without `token_ids` are tokenised here (`retokenised`). `name` is shown in errors. Over
    `max_length` the row is cut after a reply, or raises RowTooLong with `overflow="refuse"` or when no
    trained reply fits. ValueError when there is no assistant message.
    """
    messages, replies = list(messages), []
    for index, message in enumerate(messages):
        if message.role == "assistant":
            completion = Completion(text=message.text, token_ids=message.token_ids)
            replies.append(_reply(completion, renderer))
            messages[index] = replies[-1].message
    if not replies:
        raise ValueError(f"{name or 'a chat'} has no assistant message, so nothing of it can be trained")
    first = len(replies) - 1 if train == "last" else 0
    encoded = renderer.encode(messages, images, add_generation_prompt=False)
    encoded = _fit(encoded, messages, max_length, overflow, name, first)
    return _row(encoded, renderer, images, first, replies[first:], name)


def check_row(
    row: TrainingRow,
    renderer: ChatRenderer,
    images: ImageSource,
    spans: Sequence[Span],
    sampled: Sequence[Sequence[int]],
) -> None:
    """Assert what every row must satisfy; `spans[i]` is where the ids `sampled[i]` stand.

    Image pads equal grid features, image by image, in order; the mask is 1 on the sampled spans (special ids
    other than the stop ids excepted) and nowhere else, so never at the first token, which has no prefix;
    trained ids are the sampled ids; log-probabilities stand only where the mask is 1 and are those of a
    probability: finite and not above 0. AssertionError naming the trajectory and the invariant.
    """
    name = row.trajectory or "row"
    length = len(row.input_ids)
    assert len(row.loss_mask) == length, f"{name}: {len(row.loss_mask)} mask values for {length} tokens"
    assert len(row.image_spans) == len(row.images), (
        f"{name}: {len(row.image_spans)} runs of image pads for {len(row.images)} images"
    )
    _check_order(row.image_spans, length, f"{name}: the runs of image pads")
    _check_order(spans, length, f"{name}: the sampled spans")
    for ref, (start, end) in zip(row.images, row.image_spans):
        t, h, w = renderer.grid(ref, images)
        features = t * h * w // renderer.merge_size**2
        pads = row.input_ids[start:end].count(renderer.image_token_id)
        assert pads == end - start == features, (
            f"{name}: {pads} image pads at {start}:{end} for the {features} features of {ref.page_id}"
        )
    expected = [0] * length
    for (start, end), ids in zip(spans, sampled, strict=True):
        assert row.input_ids[start:end] == list(ids), (
            f"{name}: the ids at {start}:{end} are not those sampled"
        )
        expected[start:end] = _trainable(row.input_ids[start:end], renderer)
    assert row.loss_mask == expected, f"{name}: the loss mask is not the sampled spans {list(spans)}"
    assert not row.loss_mask[0], f"{name}: the first token is trained and has no prefix to be scored under"
    if row.old_logprobs is not None:
        assert len(row.old_logprobs) == length, f"{name}: {len(row.old_logprobs)} log-probs, {length} tokens"
        stray = [i for i, value in enumerate(row.old_logprobs) if value and not row.loss_mask[i]]
        assert not stray, f"{name}: log-probabilities at untrained positions {stray[:5]}"
        odd = [
            i for i, value in enumerate(row.old_logprobs) if not (math.isfinite(value) and value <= ROUNDING)
        ]
        assert not odd, f"{name}: log-probabilities at {odd[:5]} are not those of a probability"


def _check_order(spans: Sequence[Span], length: int, what: str) -> None:
    """Spans lie in the row and come one after the other; a reply that was cut at once may be empty."""
    ends = [0, *(end for _, end in spans)]
    assert all(before <= start <= end <= length for before, (start, end) in zip(ends, spans)), (
        f"{what} overlap, are out of order or leave the row: {list(spans)} of {length} tokens"
    )


# ---------------------------------------------------------------- building


@dataclass
class _Reply:
    """A reply of the policy, ids fixed."""

    message: Message
    logprobs: list[float] | None
    retokenised: bool

    @property
    def ids(self) -> list[int]:
        assert self.message.token_ids is not None
        return self.message.token_ids


def _name(trajectory: Trajectory) -> str:
    return f"{trajectory.question_id}/{trajectory.sample_index}"


def _reply(completion: Completion, renderer: ChatRenderer) -> _Reply:
    """Fix the ids of a reply. One known as text only is tokenised here, without an end-of-turn id when it was
    cut by the length limit."""
    ids = completion.token_ids
    if ids is None:
        ids = renderer.reply_ids(completion.text, complete=completion.finish_reason == FinishReason.STOP)
    message = Message(role="assistant", content=[TextPart(text=completion.text)], token_ids=ids)
    return _Reply(message, completion.logprobs, completion.token_ids is None)


def _trainable(ids: Sequence[int], renderer: ChatRenderer) -> list[int]:
    """1 for each id the policy may produce; 0 for image pads and other special ids it emitted by mistake."""
    return [int(i not in renderer.special_ids or i in renderer.stop_ids) for i in ids]


def _fit(
    encoded: Encoded,
    messages: Sequence[Message],
    max_length: int | None,
    overflow: Overflow,
    name: str,
    first: int,
) -> Encoded:
    """Cut after the last reply that ends within `max_length`. RowTooLong by choice, or when reply number
    `first`, the first trained one, does not fit."""
    length = len(encoded.input_ids)
    if max_length is None or length <= max_length:
        return encoded
    ends = [end for message, end in zip(messages, encoded.message_ends) if message.role == "assistant"]
    fitting = [end for end in ends if end <= max_length]
    if overflow == "refuse" or len(fitting) <= first:
        raise RowTooLong(f"{name or 'a row'} has {length} tokens, over the limit of {max_length}")
    limit = fitting[-1]
    shown = sum(end <= limit for _, end in encoded.image_spans)
    return Encoded(
        input_ids=encoded.input_ids[:limit],
        images=encoded.images[:shown],
        image_sizes=encoded.image_sizes[:shown],
        grids=encoded.grids[:shown],
        image_spans=encoded.image_spans[:shown],
        assistant_spans=encoded.assistant_spans[: len(fitting)],
        message_ends=[end for end in encoded.message_ends if end <= limit],
    )


def _row(
    encoded: Encoded,
    renderer: ChatRenderer,
    images: ImageSource,
    first: int,
    replies: Sequence[_Reply],
    name: str,
) -> TrainingRow:
    """Build and check a row: loss on the assistant spans from number `first` on, which are `replies`; those
    that were cut away at the end are counted."""
    spans = encoded.assistant_spans[first:]
    kept = replies[: len(spans)]
    mask = [0] * len(encoded.input_ids)
    for (start, end), reply in zip(spans, kept, strict=True):
        mask[start:end] = _trainable(reply.ids, renderer)
    row = TrainingRow(
        input_ids=encoded.input_ids,
        loss_mask=mask,
        images=encoded.images,
        old_logprobs=_old_logprobs(spans, kept, mask, name),
        trajectory=name,
        retokenised=any(reply.retokenised for reply in kept),
        image_spans=encoded.image_spans,
        turns_cut=len(replies) - len(kept),
    )
    check_row(row, renderer, images, spans, [reply.ids for reply in kept])
    return row


def _old_logprobs(
    spans: Sequence[Span], replies: Sequence[_Reply], mask: list[int], name: str
) -> list[float] | None:
    """(L,) log-probabilities as sampled, None unless every reply has them."""
    values = [0.0] * len(mask)
    for (start, end), reply in zip(spans, replies):
        if reply.logprobs is None:
            return None
        assert len(reply.logprobs) == end - start, (
            f"{name}: {len(reply.logprobs)} log-probabilities for {end - start} sampled ids"
        )
        values[start:end] = reply.logprobs
    return [value if trained else 0.0 for value, trained in zip(values, mask)]
