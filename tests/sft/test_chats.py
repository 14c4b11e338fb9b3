import json
from pathlib import Path

import pytest
from PIL import Image

from rollout.chats import ChatImages, chat_record, chat_row, read_chats, write_chats
from visor.models.loading import load_processor
from visor.types import text_message

SAMPLE = Path(__file__).parents[2].parent / "shared" / "data" / "formats" / "search_sft.json"
BUDGET = (56 * 56, 56 * 56)


@pytest.fixture(scope="module")
def renderer(world):
    return load_processor(world / "policy").renderer()


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def chat(assistant=" apple 1", user="page <image>", images=("a.png",), **keys):
    return {
        "messages": [
            {"role": "user", "content": user},
            {"role": "assistant", "content": assistant, **keys},
        ],
        "images": list(images),
    }


def test_the_fields_own_file_is_read():
    if not SAMPLE.exists():
        pytest.skip("the shared data folder is not here")
    records = json.loads(SAMPLE.read_text())
    chats = read_chats(SAMPLE, BUDGET)
    assert len(chats) == len(records)
    for ours, theirs in zip(chats, records):
        assert [m.role for m in ours.messages] == [m["role"] for m in theirs["messages"]]
        assert sum(len(m.images) for m in ours.messages) == len(theirs["images"])


def test_files_are_found_beside_the_data_and_shown(tmp_path, renderer):
    Image.new("RGB", (80, 80), "red").save(tmp_path / "a.png")
    (parsed,) = read_chats(write(tmp_path / "d.jsonl", chat()), BUDGET)
    row = chat_row(parsed, renderer, ChatImages())
    assert len(row.images) == 1
    assert row.input_ids.count(renderer.image_token_id) == 4
    assert sum(row.loss_mask) == len(renderer.text_ids(" apple 1")) + 1


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (chat(images=()), "1 <image> placeholders for 0 images"),
        (chat(user="page", images=("a.png",)), "0 <image> placeholders for 1 images"),
        ({"images": []}, "list of messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "message 1"),
        ({"messages": ["x"]}, "message 1"),
        (chat(images=[{"page": "x"}]), "neither a path nor"),
    ],
)
def test_a_broken_record_is_named(tmp_path, record, problem):
    path = write(tmp_path / "d.jsonl", chat(user="page", images=()), record)
    with pytest.raises(ValueError, match=f"d.jsonl row 2.*{problem}"):
        read_chats(path, BUDGET)


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"messages": []}\n\n{"messages": [\n')
    with pytest.raises(ValueError, match="line 3"):
        read_chats(path, BUDGET)


def test_untrained_and_incomplete_messages(tmp_path, renderer):
    record = chat(user="page", images=(), complete=False)
    record["messages"][:0] = [
        {"role": "user", "content": "search"},
        {"role": "assistant", "content": " brick", "train": False},
    ]
    (parsed,) = read_chats(write(tmp_path / "d.jsonl", record), BUDGET)
    row = chat_row(parsed, renderer, ChatImages())
    trained = [i for i, m in zip(row.input_ids, row.loss_mask) if m]
    assert trained == renderer.text_ids(" apple 1")


def test_round_trip(tmp_path):
    (parsed,) = read_chats(write(tmp_path / "d.jsonl", chat()), BUDGET)
    assert write_chats(tmp_path / "again.jsonl", [parsed.messages]) == 1
    (again,) = read_chats(tmp_path / "again.jsonl", BUDGET)
    assert again.messages == parsed.messages
    with pytest.raises(ValueError, match="stands for an image"):
        write_chats(tmp_path / "bad.jsonl", [[text_message("user", "an <image> tag")]])
    assert chat_record([text_message("user", "x")]) == {
        "messages": [{"role": "user", "content": "x"}],
        "images": [],
    }


def test_missing_pictures_and_corpus_are_named(tmp_path, renderer):
    (parsed,) = read_chats(write(tmp_path / "d.jsonl", chat()), BUDGET)
    with pytest.raises(ValueError, match="no image file"):
        chat_row(parsed, renderer, ChatImages())
    (page,) = read_chats(write(tmp_path / "e.jsonl", chat(images=[{"page_id": "d#page=1"}])), BUDGET)
    with pytest.raises(ValueError, match="corpus"):
        chat_row(page, renderer, ChatImages())
