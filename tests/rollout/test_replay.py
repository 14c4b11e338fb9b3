from pathlib import Path

import pytest

from data.corpus import Corpus
from rollout.evaluate import EvaluateConfig, evaluate
from rollout.recorder import read_lines, rewrite
from rollout.replay import compare_trajectories, replay, replay_run
from visor.env.config import EpisodeConfig
from visor.types import ErrorRecord, Question, StopReason, Trajectory


@pytest.fixture
def run(world, tmp_path, client) -> Path:
    config = EvaluateConfig(
        corpus=str(world.corpus),
        benchmark=world.questions,
        output=str(tmp_path / "run"),
        episode={"prompts": "tiny", "max_turns": 5},
        taec="on",
    )
    evaluate(config, client)
    return tmp_path / "run"


def first_of(run) -> Trajectory:
    return Trajectory.model_validate(next(read_lines(run / "trajectories.jsonl")))


def test_an_unchanged_environment_gives_no_difference(run):
    assert replay_run(run) == (4, [])
    assert replay_run(run, recorded=True) == (4, [])


def test_a_changed_record_is_named_with_its_turn_and_field(run):
    records = list(read_lines(run / "trajectories.jsonl"))
    records[0]["turns"][1]["observation"]["crop"][0] += 1
    records[0]["turns"][0]["candidates"][0][1] = 99.0
    records[1]["answer"] = "something else"
    rewrite(run / "trajectories.jsonl", records)
    _, differences = replay_run(run)
    name = records[0]["question_id"]
    found = [(d.trajectory, d.turn, d.field) for d in differences]
    assert found == [
        (f"{name}/0", 0, "candidates"),
        (f"{name}/0", 1, "observation"),
        (f"{records[1]['question_id']}/0", None, "answer"),
    ]
    assert "recorded 'something else', now" in str(differences[-1])
    _, without_index = replay_run(run, recorded=True)
    assert (f"{name}/0", 0, "candidates") not in [(d.trajectory, d.turn, d.field) for d in without_index]


def test_other_settings_show_as_differences(run, world):
    trajectory = first_of(run)
    question = Question(question_id=trajectory.question_id, text=trajectory.question)
    store = Corpus.open(world.corpus)
    config = EpisodeConfig.model_validate(trajectory.meta["episode"])
    assert replay(trajectory, question, store, config) == []
    narrow = config.model_copy(update={"window": 1})
    assert {d.field for d in replay(trajectory, question, store, narrow)} == {"context"}
    no_intent = config.model_copy(update={"intent_injection": False})
    assert "observation" in {d.field for d in replay(trajectory, question, store, no_intent)}
    short = config.model_copy(update={"max_turns": 2})
    assert {"turns", "stop_reason", "answer"} <= {d.field for d in replay(trajectory, question, store, short)}


def test_a_client_fault_of_the_record_is_no_difference(run, world):
    trajectory = first_of(run)
    trajectory.turns = trajectory.turns[:1]
    trajectory.answer, trajectory.stop_reason = None, StopReason.ERROR
    trajectory.error = ErrorRecord(source="policy", type="TimeoutError", message="slow")
    question = Question(question_id=trajectory.question_id, text=trajectory.question)
    config = EpisodeConfig.model_validate(trajectory.meta["episode"])
    assert replay(trajectory, question, Corpus.open(world.corpus), config) == []


def test_length_stops_are_replayed(run, world):
    trajectory = first_of(run)
    cut = trajectory.model_copy(
        update={"turns": trajectory.turns[:2], "answer": None, "stop_reason": StopReason.LENGTH}
    )
    question = Question(question_id=cut.question_id, text=cut.question)
    config = EpisodeConfig.model_validate(cut.meta["episode"])
    assert replay(cut, question, Corpus.open(world.corpus), config) == []


def test_times_are_not_compared(run):
    trajectory = first_of(run)
    other = trajectory.model_copy(deep=True)
    other.turns[0].retrieval_seconds += 1
    other.turns[0].completion.seconds += 1
    assert compare_trajectories(trajectory, other) == []
