import json

import pytest
from training_world import EPISODE, answer, search

from rollout.chats import ChatImages, chat_row, read_chats
from rollout.recorder import read_lines
from rollout.rows import trajectory_row, turn_rows
from sft import distill as module
from sft.distill import DistillConfig, distill
from sft.export import export
from visor.env.config import EpisodeConfig
from visor.env.crop import ImageCutter
from visor.models.loading import load_processor
from visor.types import Completion

BUDGET = (56 * 56, 56 * 56)


@pytest.fixture(scope="module")
def renderer(world):
    return load_processor(world / "policy").renderer()


def test_exported_chats_train_the_same_rows(play, renderer, tmp_path):
    trajectory = play([search("brick"), search("apple number"), answer("1")])
    images = ChatImages(ImageCutter(play.corpus))
    assert export([trajectory], tmp_path / "append.jsonl", "append") == 1
    (chat,) = read_chats(tmp_path / "append.jsonl", BUDGET)
    ours, expected = chat_row(chat, renderer, images), trajectory_row(trajectory, renderer, images)
    assert (ours.input_ids, ours.loss_mask, ours.images) == (
        expected.input_ids, expected.loss_mask, expected.images,
    )  # fmt: skip


def test_exported_turns_train_the_last_reply_only(play, renderer, tmp_path):
    trajectory = play([search("brick"), search("apple number"), answer("1")], window=1, evidence_space=True)
    images = ChatImages(ImageCutter(play.corpus))
    assert export([trajectory], tmp_path / "episode.jsonl", "episode") == 3
    chats = read_chats(tmp_path / "episode.jsonl", BUDGET)
    for chat, expected in zip(chats, turn_rows(trajectory, renderer, images), strict=True):
        row = chat_row(chat, renderer, images)
        assert (row.input_ids, row.loss_mask) == (expected.input_ids, expected.loss_mask)


class Teacher:
    name = "teacher"

    def __init__(self):
        self.contexts = []
        self.broken = False

    async def complete(self, request):
        self.contexts.append(request.messages)
        if self.broken:
            raise ConnectionError("the endpoint is down")
        replies = len([m for m in request.messages if m.role == "assistant"])
        return Completion(text=search("apple number") if replies < 2 else answer("1"))


def test_distillation_appends_resumes_and_asks_failed_ones_again(world, tmp_path):
    config = DistillConfig(
        model="script:unused", corpus=str(world / "corpus"), output=str(tmp_path / "out.jsonl"),
        questions=f"questions:{world / 'questions.jsonl'}", limit=2,
        episode={**EPISODE, "window": None, "evidence_space": False},
    )  # fmt: skip
    teacher = Teacher()
    teacher.broken = True
    assert distill(config, teacher) == (0, 2)
    # A failed episode is a record, never a missing row; one that is not asked again stays.
    faults = {r["question_id"]: r["error"]["message"] for r in read_lines(tmp_path / "out.jsonl")}
    assert faults.keys() == {"q1", "q2"}
    assert "the endpoint is down" in faults["q1"]
    teacher = Teacher()
    assert distill(config.model_copy(update={"limit": 1}), teacher) == (1, 0)
    left = {r["question_id"]: bool(r["error"]) for r in read_lines(tmp_path / "out.jsonl")}
    assert left == {"q1": False, "q2": True}
    assert distill(config, teacher) == (1, 0)
    assert distill(config.model_copy(update={"limit": 3}), teacher) == (1, 0)
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(r["question_id"] for r in records) == ["q1", "q2", "q3"]
    # Append-only: system, question, then every reply and observation so far.
    assert [len(context) for context in teacher.contexts[:6]].count(6) == 2
    assert {r["reward"]["verdict"] for r in records} == {True, False}
    assert DistillConfig(model="x", corpus="c", questions="q", output="o").episode.window is None


def test_trajectories_of_other_settings_are_not_mixed(world, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    config = DistillConfig(
        model="script:unused", corpus=str(world / "corpus"), output=str(output), limit=1,
        questions=f"questions:{world / 'questions.jsonl'}",
        episode={**EPISODE, "window": None, "evidence_space": False},
    )  # fmt: skip
    assert distill(config, Teacher()) == (1, 0)
    before = output.read_text()
    hotter = config.model_copy(update={"temperature": 0.9, "max_concurrency": 3, "limit": 2})
    with pytest.raises(ValueError, match=r"sampling\.temperature: 0\.1 before, 0\.9 now"):
        distill(hotter, Teacher())
    windowed = config.model_copy(update={"episode": EpisodeConfig(**EPISODE), "limit": 2})
    with pytest.raises(ValueError, match=r"episode\.evidence_space: False before, True now"):
        distill(windowed, Teacher())
    assert output.read_text() == before
    assert distill(hotter.model_copy(update={"temperature": config.temperature}), Teacher()) == (1, 0)
    assert distill(hotter.model_copy(update={"allow_mixed": True, "limit": 3}), Teacher()) == (1, 0)
    assert "mixed trajectories: sampling.temperature" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "out.jsonl", "out.jsonl.manifest-2.json", "out.jsonl.manifest.json",
    ]  # fmt: skip
    (tmp_path / "out.jsonl.manifest.json").unlink()
    with pytest.raises(ValueError, match=r"no out\.jsonl\.manifest\.json beside it says what made them"):
        distill(config, Teacher())


def test_a_distillation_without_a_usable_trajectory_exits_1(world, tmp_path, monkeypatch, capsys):
    teacher = Teacher()
    teacher.broken = True
    monkeypatch.setattr(module, "distill", lambda config: distill(config, teacher))
    episode = {**EPISODE, "window": "null", "evidence_space": "false"}
    arguments = [
        *("--model", "script:unused", "--corpus", str(world / "corpus"), "--limit", "2"),
        *("--questions", f"questions:{world / 'questions.jsonl'}", "--output", str(tmp_path / "out.jsonl")),
        *(word for key, value in episode.items() for word in (f"--episode.{key}", str(value))),
    ]
    with pytest.raises(SystemExit) as stop:
        module.main(arguments)
    assert stop.value.code == 1
    shown = capsys.readouterr().err
    assert "2 × fault: policy: ConnectionError" in shown
    assert "holds no trajectory with a judged answer" in shown
    teacher.broken = False
    module.main(arguments)
    assert "holds no" not in capsys.readouterr().err


@pytest.mark.parametrize("record", [{"name": "x"}, {"question_id": "q1", "text": "a question"}])
def test_a_file_of_other_records_is_left_alone(world, tmp_path, monkeypatch, capsys, record):
    path = tmp_path / "other.jsonl"
    path.write_text(json.dumps(record) + "\n")
    monkeypatch.setattr(module, "distill", lambda config: distill(config, Teacher()))
    questions = f"questions:{world / 'questions.jsonl'}"
    with pytest.raises(SystemExit) as stop:
        module.main(
            [
                *("--model", "script:unused", "--corpus", str(world / "corpus"), "--questions", questions),
                *("--output", str(path), "--episode.prompts", "tiny"),
            ]
        )
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "other.jsonl holds other records than trajectories" in line
    assert path.read_text() == json.dumps(record) + "\n"
