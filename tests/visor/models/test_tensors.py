"""Positions and log-probabilities against Transformers and against one slow pass a row."""

import pytest
import torch
from models_support import chat, page_image, page_ref, user

from rollout.rows import TrainingRow, messages_row
from visor.models.tensors import (
    collate,
    forward_logprobs,
    model_inputs,
    mrope_positions,
)
from visor.types import text_message

CHATS = [
    chat(user("hello"), text_message("assistant", "<search>acme</search>")),
    chat(user(page_ref("a"), "q", page_ref("b")), text_message("assistant", "<think>revenue</think>")),
    chat(
        user("q"),
        text_message("assistant", "<search>acme</search>"),
        user(page_ref("c", budget=40), "and text"),
        text_message("assistant", "<answer>4</answer>"),
    ),
    chat(user(page_ref("b"), page_ref("a", number=2)), text_message("assistant", "x")),
]


@pytest.fixture(scope="module")
def rows(renderer):
    return [messages_row(messages, renderer, page_image) for messages in CHATS]


@pytest.mark.parametrize("padding", ["left", "right"])
def test_positions_equal_get_rope_index(padding, rows, renderer, model):
    batch = collate(rows, renderer, page_image, padding=padding)
    expected, _ = model.model.get_rope_index(
        batch["input_ids"],
        mm_token_type_ids=batch["mm_token_type_ids"],
        image_grid_thw=batch["image_grid_thw"],
        attention_mask=batch["attention_mask"],
    )
    assert torch.equal(batch["position_ids"], expected)


def test_positions_by_hand():
    # Two text tokens, an image of 2×3 merged patches, one text token at start + max(2, 3).
    positions = mrope_positions(9, [(2, 8)], [(1, 4, 6)])
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]


def slow_logprobs(model, row, renderer):
    """One row alone, all logits, no padding, positions from Transformers."""
    batch = collate([row], renderer, page_image)
    inputs = model_inputs(batch)
    del inputs["position_ids"], inputs["attention_mask"]
    logits = model(**inputs).logits[0].double()
    logprobs = torch.log_softmax(logits, -1)
    return [
        logprobs[t - 1, row.input_ids[t]].item() if row.loss_mask[t] else 0.0
        for t in range(len(row.input_ids))
    ]


@pytest.mark.parametrize("padding", ["left", "right"])
def test_forward_logprobs_equals_a_slow_pass(padding, rows, renderer, model):
    batch = collate(rows, renderer, page_image, padding=padding, pad_to=150)
    assert batch["input_ids"].shape[1] == 150
    with torch.no_grad():
        logprobs, entropy = forward_logprobs(model, batch, entropy=True)
        for index, row in enumerate(rows):
            offset = 150 - len(row.input_ids) if padding == "left" else 0
            expected = torch.tensor(slow_logprobs(model, row, renderer), dtype=torch.float32)
            torch.testing.assert_close(
                logprobs[index, offset : offset + len(row.input_ids)], expected, atol=2e-5, rtol=0
            )
    assert torch.equal(logprobs != 0, batch["loss_mask"])
    vocabulary = torch.tensor(float(model.config.text_config.vocab_size))
    assert (entropy[batch["loss_mask"]] > 0).all()
    assert (entropy <= vocabulary.log()).all()


def test_entropy_of_one_position(rows, renderer, model):
    batch = collate(rows[:1], renderer, page_image)
    with torch.no_grad():
        _, entropy = forward_logprobs(model, batch, entropy=True)
        logits = model(**model_inputs(batch)).logits[0]
    position = rows[0].loss_mask.index(1)
    p = torch.softmax(logits[position - 1], -1)
    assert entropy[0, position].item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-5)


def test_gradient_reaches_the_weights_and_equals_cross_entropy(rows, renderer, model):
    batch = collate(rows, renderer, page_image)
    model.zero_grad()
    (-forward_logprobs(model, batch).sum() / batch["loss_mask"].sum()).backward()
    ours = model.model.language_model.layers[0].mlp.up_proj.weight.grad.clone()
    model.zero_grad()
    model(**model_inputs(batch), labels=batch["labels"]).loss.backward()
    torch.testing.assert_close(
        ours, model.model.language_model.layers[0].mlp.up_proj.weight.grad, atol=1e-6, rtol=1e-4
    )
    model.zero_grad()


def test_collate_fields(rows, renderer):
    rows[0].old_logprobs = [0.5 * m for m in rows[0].loss_mask]
    batch = collate(rows[:1], renderer, page_image)
    assert "pixel_values" not in batch
    assert torch.equal(batch["old_logprobs"][0], batch["loss_mask"][0] * 0.5)
    assert batch["labels"][0].tolist() == [
        token if trained else -100 for token, trained in zip(rows[0].input_ids, rows[0].loss_mask)
    ]
    rows[0].old_logprobs = None
    batch = collate(rows, renderer, page_image, pixels=False)
    assert "old_logprobs" not in batch
    assert "pixel_values" not in batch
    assert batch["image_grid_thw"].shape == (5, 3)
    assert batch["mm_token_type_ids"].sum() == batch["image_grid_thw"].prod(-1).sum() // 4
    encoded = [renderer.encode(messages, page_image) for messages in CHATS]
    assert "loss_mask" not in collate(encoded, renderer, page_image, pixels=False)


def test_pads_that_do_not_match_name_the_row(renderer):
    row = messages_row(CHATS[1], renderer, page_image, name="q7/2")
    row.images = row.images[:1]
    with pytest.raises(AssertionError, match="q7/2"):
        collate([row], renderer, page_image)
    row = messages_row(CHATS[1], renderer, page_image, name="q7/2")
    row.input_ids[row.image_spans[0][0]] = 5
    with pytest.raises(AssertionError, match="q7/2: 15 image pads"):
        collate([row], renderer, page_image)


def test_case_e3_stray_pads_do_not_reach_the_model(cases, renderer, model, processor):
    """The ids of the case are of the full vocabulary; each stands for the same token of the tiny one."""
    case = cases("image_token_cases.json")
    ids = {number: processor.tokenizer.convert_tokens_to_ids(token) for token, number in case["ids"].items()}
    sampled = [ids.get(number, number) for number in case["sampled_completion"]]
    reply = text_message("assistant", "reply")
    reply.token_ids = sampled
    ref = page_ref("a", budget=case["image_features"])
    row = messages_row(chat(user(ref), reply), renderer, page_image)
    start = len(row.input_ids) - len(sampled) - 1
    assert row.input_ids[start:-1] == sampled
    assert row.loss_mask[start:-1] == [1, 0, 1, 0, 1, 1]
    assert sum(end - begin for begin, end in row.image_spans) == case["prompt_image_pads"]
    other = messages_row(CHATS[2], renderer, page_image)
    with torch.no_grad():
        alone = forward_logprobs(model, collate([other], renderer, page_image))[0]
        both = forward_logprobs(model, collate([other, row], renderer, page_image))
    assert torch.isfinite(both).all()
    torch.testing.assert_close(both[0, : len(alone)], alone, atol=1e-5, rtol=0)
    assert (both[1] != 0).sum() == 4


def test_the_first_token_cannot_be_scored(renderer, model):
    row = TrainingRow(input_ids=renderer.text_ids("hello"), loss_mask=[1, 1])
    row.loss_mask = [1] * len(row.input_ids)
    with pytest.raises(AssertionError, match="first token"):
        forward_logprobs(model, collate([row], renderer, page_image))
