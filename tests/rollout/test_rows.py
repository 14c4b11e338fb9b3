"""Rows: sampled ids stay as sampled, only they are trained, and every invariant is seen to break."""

import dataclasses
import json
from pathlib import Path

import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rollout.rows import RowTooLong, check_row, messages_row, trajectory_row, turn_rows
from visor.models.rendering import ChatRenderer, Encoded
from visor.models.tiny import build_tokenizer
from visor.types import (
    Answer,
    Completion,
    FinishReason,
    ImagePart,
    ImageRef,
    Message,
    Observation,
    ObservationKind,
    Search,
    TextPart,
    Trajectory,
    Turn,
    text_message,
)

CASES = Path(__file__).parents[2].parent / "shared" / "cases" / "files"
PAGE = ImageRef(page_id="a#page=1", min_pixels=4 * 784, max_pixels=16 * 784)


def page_image(ref: ImageRef) -> Image.Image:
    return Image.new("RGB", (112, 112), (200, 100, 50))


@pytest.fixture(scope="module")
def renderer():
    tokenizer = build_tokenizer(["the revenue is 4 . search hello", *["hello"] * 9, "he llo"] * 3, 400)
    return ChatRenderer(tokenizer, Qwen2VLImageProcessorPil())


def reply(renderer, text, **kwargs) -> Completion:
    ids = [*renderer.text_ids(text), renderer.im_end_id]
    return Completion(text=text, token_ids=ids, logprobs=[-0.25] * len(ids), **kwargs)


def page_message(text="the page", **kwargs) -> Message:
    return Message(role="user", content=[ImagePart(image=PAGE), TextPart(text=text)], **kwargs)


def assistant(completion: Completion) -> Message:
    return Message(role="assistant", content=[TextPart(text=completion.text)], token_ids=completion.token_ids)


@pytest.fixture
def trajectory(renderer) -> Trajectory:
    """Three replies; the second context is under a window of one turn and has an evidence block."""
    prompt = [text_message("system", "agent"), text_message("user", "revenue ?")]
    replies = [reply(renderer, text) for text in ("search the revenue", "hello search", "the revenue is 4")]
    seen = [page_message(f"page {i}") for i in range(2)]
    evidence = text_message("user", "evidence : the page")
    contexts = [
        prompt,
        [*prompt, assistant(replies[0]), seen[0]],
        [*prompt, evidence, assistant(replies[1]), seen[1]],
    ]
    turns = []
    for index, (context, completion) in enumerate(zip(contexts, replies)):
        completion.prompt_token_ids = renderer.encode(context, page_image).input_ids
        last = index == 2
        observation = None if last else Observation(kind=ObservationKind.PAGE, message=seen[index])
        action = Answer(text="4") if last else Search(query="revenue")
        turns.append(
            Turn(index=index, context=context, completion=completion, action=action, observation=observation)
        )
    return Trajectory(question_id="q1", question="revenue ?", sample_index=3, prompt=prompt, turns=turns)


def trained_ids(row):
    return [token for token, mask in zip(row.input_ids, row.loss_mask) if mask]


def test_trajectory_row_of_the_last_reply_only(renderer, trajectory):
    whole = trajectory_row(trajectory, renderer, page_image)
    row = trajectory_row(trajectory, renderer, page_image, train="last")
    assert row.input_ids == whole.input_ids
    assert trained_ids(row) == trajectory.turns[-1].completion.token_ids
    with pytest.raises(RowTooLong):
        trajectory_row(trajectory, renderer, page_image, len(row.input_ids) - 1, train="last")


def test_trajectory_row_trains_exactly_the_sampled_ids(renderer, trajectory):
    row = trajectory_row(trajectory, renderer, page_image)
    assert trained_ids(row) == [i for turn in trajectory.turns for i in turn.completion.token_ids]
    assert row.trajectory == "q1/3"
    assert row.turn_index is None
    assert not row.retokenised
    text = renderer.tokenizer.decode([i for i in row.input_ids if i != renderer.image_token_id])
    assert text == (
        "<|im_start|>system\nagent<|im_end|>\n<|im_start|>user\nrevenue ?<|im_end|>\n"
        "<|im_start|>assistant\nsearch the revenue<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|vision_end|>page 0<|im_end|>\n"
        "<|im_start|>assistant\nhello search<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|vision_end|>page 1<|im_end|>\n"
        "<|im_start|>assistant\nthe revenue is 4<|im_end|>\n"
    )
    assert row.old_logprobs == [-0.25 * mask for mask in row.loss_mask]
    assert len(row.images) == 2


def test_turn_rows_have_the_context_they_were_sampled_under(renderer, trajectory):
    rows = turn_rows(trajectory, renderer, page_image)
    assert [row.turn_index for row in rows] == [0, 1, 2]
    for row, turn in zip(rows, trajectory.turns):
        prompt = turn.completion.prompt_token_ids
        assert row.input_ids[: len(prompt)] == prompt
        assert trained_ids(row) == turn.completion.token_ids
        start = len(prompt)
        length = len(turn.completion.token_ids)
        assert row.loss_mask.index(1) == start
        assert row.old_logprobs[start : start + length] == turn.completion.logprobs
    whole = trajectory_row(trajectory, renderer, page_image)
    assert sum(sum(row.loss_mask) for row in rows) == sum(whole.loss_mask)


def test_turn_row_under_another_context_is_refused(renderer, trajectory):
    trajectory.turns[1].context.pop()
    with pytest.raises(AssertionError, match="q1/3 turn 1"):
        turn_rows(trajectory, renderer, page_image)


class SegmentRenderer(ChatRenderer):
    """Renders each message as bare ids of a given length, without the chat format around them."""

    segments: list[tuple[str, int]]

    def encode(self, messages, images, add_generation_prompt=True):
        encoded = Encoded()
        for message, (_, length) in zip(messages, self.segments, strict=True):
            start = len(encoded.input_ids)
            encoded.input_ids += message.token_ids or [7] * length
            if message.role == "assistant":
                encoded.assistant_spans.append((start, start + length))
            encoded.message_ends.append(start + length)
        return encoded


def test_case_e4_mask_is_one_on_model_segments_only(renderer):
    if not CASES.is_dir():
        pytest.skip("the shared cases are not beside this checkout")
    case = json.loads((CASES / "mask_case.json").read_text())
    pieces = [renderer.text_ids(piece) for piece in case["retokenise"]["sampled_pieces"]]
    sampled = [token for piece in pieces for token in piece]
    assert len(sampled) == 2
    assert renderer.text_ids(case["retokenise"]["text"]) != sampled

    segments = SegmentRenderer(renderer.tokenizer, renderer.image_processor)
    segments.segments = case["segments"]
    first, second = (length for kind, length in case["segments"] if kind == "model")
    prompt = [text_message("user", "q")]
    replies = [
        Completion(text="hello", token_ids=[*sampled, 30, 31, 32][:first]),
        Completion(text="x", token_ids=[33, 34, 35, renderer.im_end_id][:second]),
    ]
    seen = Observation(kind=ObservationKind.INVALID, message=text_message("user", "seen"))
    turns = [
        Turn(index=0, context=prompt, completion=replies[0], action=Search(query="q"), observation=seen),
        Turn(index=1, context=prompt, completion=replies[1], action=Answer(text="x")),
    ]
    row = trajectory_row(
        Trajectory(question_id="e4", question="q", prompt=prompt, turns=turns), segments, page_image
    )
    assert [i for i, mask in enumerate(row.loss_mask) if mask] == case["right_ones_at"]
    assert sum(row.loss_mask) == case["right_sum"]
    assert trained_ids(row)[:2] == sampled


def test_case_e3_stray_special_ids_are_not_trained(renderer):
    pad, start = renderer.image_token_id, renderer.tokenizer.convert_tokens_to_ids("<|vision_start|>")
    sampled = [100, pad, 200, start, 300, renderer.im_end_id]
    completion = Completion(text="?", token_ids=sampled, logprobs=[-1.0] * 6)
    turn = Turn(index=0, context=[page_message()], completion=completion, action=Answer(text="?"))
    trajectory = Trajectory(question_id="e3", question="q", prompt=[page_message()], turns=[turn])
    for row in [
        trajectory_row(trajectory, renderer, page_image),
        *turn_rows(trajectory, renderer, page_image),
    ]:
        begin = row.loss_mask.index(1)
        assert row.input_ids[begin : begin + 6] == sampled
        assert row.loss_mask[begin : begin + 6] == [1, 0, 1, 0, 1, 1]
        assert row.old_logprobs[begin : begin + 6] == [-1.0, 0.0, -1.0, 0.0, -1.0, -1.0]
        assert len(row.image_spans) == 1
        assert row.image_spans[0][1] < begin


def test_a_text_only_reply_is_tokenised_once_and_said(renderer, trajectory):
    trajectory.turns[1].completion.token_ids = None
    trajectory.turns[1].completion.logprobs = None
    row = trajectory_row(trajectory, renderer, page_image)
    assert row.retokenised
    assert row.old_logprobs is None
    assert trained_ids(row).count(renderer.im_end_id) == 3
    rows = turn_rows(trajectory, renderer, page_image)
    assert [row.retokenised for row in rows] == [False, True, False]


def test_a_cut_text_only_reply_does_not_train_an_end_of_turn(renderer):
    completion = Completion(text="hello", finish_reason=FinishReason.LENGTH)
    prompt = [text_message("user", "q")]
    turn = Turn(index=0, context=prompt, completion=completion, action=Answer(text="?"))
    trajectory = Trajectory(question_id="q", question="q", prompt=prompt, turns=[turn])
    row = trajectory_row(trajectory, renderer, page_image)
    assert trained_ids(row) == renderer.text_ids("hello")
    assert row.input_ids[len(row.input_ids) - 2] == renderer.im_end_id
    turn.completion.text = ""
    assert trained_ids(trajectory_row(trajectory, renderer, page_image)) == []


def test_trailing_observation_is_left_out(renderer, trajectory):
    trajectory.turns.pop()
    row = trajectory_row(trajectory, renderer, page_image)
    assert row.input_ids[-2] == renderer.im_end_id
    assert len(row.images) == 1
    assert row.loss_mask[-2] == 1


def test_over_the_limit_a_row_is_cut_at_a_turn_boundary(renderer, trajectory):
    whole = trajectory_row(trajectory, renderer, page_image)
    row = trajectory_row(trajectory, renderer, page_image, max_length=len(whole.input_ids) - 1)
    assert row.turns_cut == 1
    assert whole.input_ids[: len(row.input_ids)] == row.input_ids
    assert trained_ids(row) == [i for turn in trajectory.turns[:2] for i in turn.completion.token_ids]
    assert len(row.images) == len(row.image_spans) == 1
    exact = trajectory_row(trajectory, renderer, page_image, max_length=len(row.input_ids))
    assert exact == row
    assert trajectory_row(trajectory, renderer, page_image, max_length=len(row.input_ids) - 1).turns_cut == 2
    with pytest.raises(RowTooLong, match="q1/3"):
        trajectory_row(
            trajectory, renderer, page_image, max_length=len(whole.input_ids) - 1, overflow="refuse"
        )
    with pytest.raises(RowTooLong, match="over the limit of 5"):
        trajectory_row(trajectory, renderer, page_image, max_length=5)


def test_trajectory_without_turns_is_refused(renderer):
    with pytest.raises(ValueError, match="q9/0 has no turns"):
        trajectory_row(Trajectory(question_id="q9", question="q"), renderer, page_image)


def test_messages_row(renderer):
    messages = [
        text_message("user", "q"),
        text_message("assistant", "search"),
        page_message(),
        text_message("assistant", "the revenue"),
    ]
    both = messages_row(messages, renderer, page_image)
    assert trained_ids(both) == renderer.reply_ids("search") + renderer.reply_ids("the revenue")
    assert both.retokenised
    last = messages_row(messages, renderer, page_image, train="last")
    assert trained_ids(last) == renderer.reply_ids("the revenue")
    assert last.input_ids == both.input_ids
    limit = len(both.input_ids) - 1
    assert trained_ids(messages_row(messages, renderer, page_image, max_length=limit)) == renderer.reply_ids(
        "search"
    )
    with pytest.raises(RowTooLong):
        messages_row(messages, renderer, page_image, train="last", max_length=limit)
    with pytest.raises(ValueError, match="sample 4 has no assistant"):
        messages_row(messages[:1], renderer, page_image, name="sample 4")
    assert messages[1].token_ids is None  # the caller's messages stay as they were


def shift_mask(row):
    row.loss_mask = [0, *row.loss_mask[:-1]]


def invert_mask(row):
    row.loss_mask = [1 - mask for mask in row.loss_mask]


def train_prompt_token(row):
    row.loss_mask[2] = 1


def train_stray(row):
    stray = next(i for i, m in enumerate(row.loss_mask) if m) + 1
    row.loss_mask[stray] = 1


def change_sampled_id(row):
    row.input_ids[row.loss_mask.index(1)] += 1


def drop_image(row):
    row.images.pop()


def replace_pad(row):
    row.input_ids[row.image_spans[0][0]] = 7


def shorten_span(row):
    start, end = row.image_spans[0]
    row.image_spans[0] = (start, end - 1)


def short_mask(row):
    row.loss_mask.pop()


def logprob_outside(row):
    row.old_logprobs[0] = -1.0


def positive_logprob(row):
    row.old_logprobs[row.loss_mask.index(1)] = 0.5


def missing_logprob(row):
    row.old_logprobs[row.loss_mask.index(1)] = float("-inf")


def undefined_logprob(row):
    row.old_logprobs[row.loss_mask.index(1)] = float("nan")


def span_beyond_the_row(row):
    start, _ = row.image_spans[0]
    row.image_spans[0] = (start, len(row.input_ids) + 1)


def empty_span(row):
    start, _ = row.image_spans[0]
    row.image_spans[0] = (start, start)


def short_logprobs(row):
    row.old_logprobs.pop()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shift_mask, "loss mask"),
        (invert_mask, "loss mask"),
        (train_prompt_token, "loss mask"),
        (train_stray, "loss mask"),
        (change_sampled_id, "not those sampled"),
        (drop_image, "images"),
        (replace_pad, "image pads"),
        (shorten_span, "image pads"),
        (short_mask, "mask values"),
        (logprob_outside, "untrained positions"),
        (short_logprobs, "log-probs"),
        (positive_logprob, "not those of a probability"),
        (missing_logprob, "not those of a probability"),
        (undefined_logprob, "not those of a probability"),
        (span_beyond_the_row, "leave the row"),
        (empty_span, "image pads"),
    ],
)
def test_each_broken_invariant_is_named(damage, message, renderer):
    sampled = [100, renderer.image_token_id, 200, renderer.im_end_id]
    completion = Completion(text="?", token_ids=sampled, logprobs=[-1.0] * 4)
    turn = Turn(index=0, context=[page_message()], completion=completion, action=Answer(text="?"))
    trajectory = Trajectory(question_id="q5", question="q", prompt=[page_message()], turns=[turn])
    row = trajectory_row(trajectory, renderer, page_image)
    begin = row.loss_mask.index(1)
    spans = [(begin, begin + 4)]
    check_row(row, renderer, page_image, spans, [sampled])
    broken = dataclasses.replace(
        row,
        input_ids=list(row.input_ids),
        loss_mask=list(row.loss_mask),
        images=list(row.images),
        image_spans=list(row.image_spans),
        old_logprobs=list(row.old_logprobs),
    )
    damage(broken)
    with pytest.raises(AssertionError, match=f"q5/0.*{message}"):
        check_row(broken, renderer, page_image, spans, [sampled])


def test_broken_spans_are_named(renderer, trajectory):
    row = trajectory_row(trajectory, renderer, page_image)
    starts = [i for i, mask in enumerate(row.loss_mask) if mask and not row.loss_mask[i - 1]]
    sampled = [turn.completion.token_ids for turn in trajectory.turns]
    spans = [(start, start + len(ids)) for start, ids in zip(starts, sampled)]
    check_row(row, renderer, page_image, spans, sampled)
    for order in ((1, 0, 2), (0, 0, 1, 2)):  # out of order; one counted twice
        with pytest.raises(AssertionError, match="q1/3: the sampled spans overlap, are out of order"):
            check_row(row, renderer, page_image, [spans[i] for i in order], [sampled[i] for i in order])
    with pytest.raises(AssertionError, match="q1/3: the loss mask is not"):  # one forgotten
        check_row(row, renderer, page_image, spans[:2], sampled[:2])
    first, second = row.image_spans
    for broken in ([second, first], [first, first]):
        damaged = dataclasses.replace(row, image_spans=broken)
        with pytest.raises(AssertionError, match="q1/3: the runs of image pads overlap"):
            check_row(damaged, renderer, page_image, spans, sampled)


def test_a_trained_first_token_is_named(renderer):
    from rollout.rows import TrainingRow

    ids = [100, 200, renderer.im_end_id]
    row = TrainingRow(input_ids=ids, loss_mask=[1, 1, 1], trajectory="q8/0")
    with pytest.raises(AssertionError, match="q8/0: the first token is trained"):
        check_row(row, renderer, page_image, [(0, 3)], [ids])


def test_log_probabilities_of_another_length_are_refused(renderer, trajectory):
    trajectory.turns[0].completion.logprobs.pop()
    with pytest.raises(AssertionError, match=r"q1/3: 5 log-probabilities for 6 sampled ids"):
        trajectory_row(trajectory, renderer, page_image)
