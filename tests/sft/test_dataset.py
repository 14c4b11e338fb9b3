import json
import logging

import pytest
from PIL import Image
from training_world import answer, search

from rollout.chats import ChatImages
from rollout.rows import trajectory_row, turn_rows
from sft.arguments import DataSource
from sft.dataset import LazyRows
from visor.env.crop import ImageCutter
from visor.models.loading import load_processor
from visor.types import Message


@pytest.fixture(scope="module")
def setting(world, play):
    return load_processor(world / "policy").renderer(), ChatImages(ImageCutter(play.corpus))


@pytest.fixture
def trajectories(play, tmp_path):
    records = [
        play([search("brick"), search("apple number"), answer("1")], window=1, evidence_space=True),
        play([search("cloud number"), answer("3")], number=3),
    ]
    failed = play([answer("1")], sample_index=5)
    failed.turns = []
    path = tmp_path / "t.jsonl"
    path.write_text("".join(t.model_dump_json() + "\n" for t in [*records, failed]))
    return path, records


def rows_of(setting, *sources, **options):
    return LazyRows([DataSource(**source) for source in sources], *setting, **options)


def test_episode_rows_are_the_turns_own(setting, trajectories):
    path, records = trajectories
    rows = rows_of(setting, {"path": str(path)})
    expected = [row for t in records for row in turn_rows(t, *setting)]
    assert len(rows) == len(expected) == 5
    for _ in range(2):  # built, then from memory
        for ours, theirs in zip(rows, expected):
            assert (ours.input_ids, ours.loss_mask, ours.images, ours.image_spans) == (
                theirs.input_ids, theirs.loss_mask, theirs.images, theirs.image_spans,
            )  # fmt: skip
    assert rows.counts.left_out == {"failed or empty trajectories": 1}


def test_append_rows_are_whole_trajectories(setting, trajectories):
    path, records = trajectories
    rows = rows_of(setting, {"path": str(path)}, context="append")
    assert [rows[i].input_ids for i in range(2)] == [trajectory_row(t, *setting).input_ids for t in records]


def test_a_source_may_have_its_own_context(setting, trajectories):
    path, records = trajectories
    rows = rows_of(setting, {"path": str(path), "context": "append"}, {"path": str(path)})
    expected = [trajectory_row(t, *setting) for t in records]
    expected += [row for t in records for row in turn_rows(t, *setting)]
    assert [row.input_ids for row in rows] == [row.input_ids for row in expected]


def test_a_source_may_train_the_last_reply_only(setting, trajectories):
    path, records = trajectories
    rows = rows_of(setting, {"path": str(path), "train": "last"})
    assert [row.input_ids for row in rows] == [turn_rows(t, *setting)[-1].input_ids for t in records]
    for context, (row, record) in enumerate(
        zip(rows_of(setting, {"path": str(path), "train": "last"}, context="append"), records)
    ):
        whole = trajectory_row(record, *setting)
        start, end = (
            setting[0]
            .encode([*record.prompt, *_messages(record)], setting[1], add_generation_prompt=False)
            .assistant_spans[-1]
        )
        assert row.input_ids == whole.input_ids, context
        assert row.loss_mask == [m if start <= i < end else 0 for i, m in enumerate(whole.loss_mask)]
        assert sum(row.loss_mask) > 0


@pytest.mark.parametrize("setting", [{"train": "last"}, {"context": "append"}])
def test_settings_of_trajectories_are_refused_for_chats(setting):
    with pytest.raises(ValueError, match="are of trajectories"):
        DataSource(path="chats.json", kind="messages", **setting)


def _messages(record):
    for turn in record.turns:
        yield Message(
            role="assistant",
            content=[{"type": "text", "text": turn.completion.text}],
            token_ids=turn.completion.token_ids,
        )
        if turn is not record.turns[-1]:
            yield turn.observation.message


def test_bounds_hold_and_long_rows_are_left_out(setting, trajectories):
    path, records = trajectories
    rows = rows_of(setting, {"path": str(path)})
    sizes = [len(rows[i].input_ids) for i in range(len(rows))]
    assert all(entry.bound >= size for entry, size in zip(rows._entries, sizes))
    limit = sorted(sizes)[2]
    short = rows_of(setting, {"path": str(path)}, max_length=limit)
    assert sorted(len(short[i].input_ids) for i in range(len(short))) == sorted(
        s for s in sizes if s <= limit
    )
    assert short.counts.left_out["over max_length"] == len(sizes) - len(short)
    whole = len(trajectory_row(records[0], *setting).input_ids)
    cut = rows_of(setting, {"path": str(path)}, context="append", max_length=whole - 1)
    assert len(cut[0].input_ids) < whole
    assert cut.counts.left_out["turns cut off the end"] == 1


def test_weights(setting, trajectories):
    path, _ = trajectories
    assert len(rows_of(setting, {"path": str(path), "weight": 2})) == 10
    half = rows_of(setting, {"path": str(path), "weight": 0.4}, seed=1)
    assert len(half) == 2
    assert len(rows_of(setting, {"path": str(path), "weight": 1.4})) == 7


def chat_file(tmp_path, *names):
    path = tmp_path / "chats.jsonl"
    with path.open("w") as file:
        for name in names:
            messages = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": name}]
            file.write(json.dumps({"messages": messages, "images": [f"{name}.png"]}) + "\n")
    return path


def test_a_damaged_picture_is_replaced_and_reported(setting, tmp_path, caplog):
    Image.effect_noise((64, 64), 90).convert("RGB").save(tmp_path / "good.png")
    whole = (tmp_path / "good.png").read_bytes()
    (tmp_path / "bad.png").write_bytes(whole[: len(whole) // 2])
    rows = rows_of(setting, {"path": str(chat_file(tmp_path, "bad", "good")), "kind": "messages"})
    with caplog.at_level(logging.WARNING):
        assert rows[0].input_ids == rows[1].input_ids
    assert "row 0 (chats.jsonl row 1) cannot be used" in caplog.text
    assert "bad.png is a truncated or damaged image" in caplog.text
    assert rows.counts.left_out["unusable"] == 1
    alone = rows_of(setting, {"path": str(chat_file(tmp_path, "bad")), "kind": "messages"})
    with pytest.raises(ValueError, match="no row"):
        alone[0]


def test_a_broken_line_is_named(setting, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"question_id": "a"}\n')
    with pytest.raises(ValueError, match=r"t\.jsonl line 1.*question"):
        rows_of(setting, {"path": str(path)})
