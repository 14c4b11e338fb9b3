"""What a run folder holds in memory while it grows, and that its two files agree after a resume."""

import tracemalloc

from rollout.engine import EpisodeJob, RolloutEngine
from rollout.recorder import read_lines
from rollout.run_folder import RunFolder
from visor.types import (
    Completion,
    Question,
    RewardBreakdown,
    Search,
    StopReason,
    Trajectory,
    Turn,
    text_message,
)


def trajectory(question: Question) -> Trajectory:
    turns = [
        Turn(
            index=index,
            context=[text_message("system", "rules " * 50), text_message("user", question.text)],
            completion=Completion(
                text="<think>because of it</think><search>words</search>", token_ids=[1] * 40
            ),
            action=Search(query="words"),
            query="words",
            candidates=[(f"d#page={n}", 1.0 / n) for n in range(1, 11)],
        )
        for index in range(4)
    ]
    reward = RewardBreakdown(total=0.0, judge="rule", verdict=False)
    fields = {"answer": "a", "stop_reason": StopReason.ANSWER, "reward": reward}
    fields |= {"question": question.text, "prompt": [], "turns": turns}
    return Trajectory(question_id=question.question_id, system="visor", **fields)


def test_a_row_leaves_no_more_than_its_key_in_memory(tmp_path):
    """A row with four searches is some thousands of bytes; its key takes a tuple in three sets."""
    rows, warm = 1500, 200
    questions = {f"q{n}": Question(question_id=f"q{n}", text=f"question {n}") for n in range(rows + warm)}
    folder = RunFolder(tmp_path, questions, sync_every=0)
    (tmp_path / "trajectories.jsonl").touch()
    folder.resume(RolloutEngine(None, None))
    names = list(questions)
    for name in names[:warm]:
        folder.add(EpisodeJob(questions[name]), trajectory(questions[name]))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for name in names[warm:]:
            folder.add(EpisodeJob(questions[name]), trajectory(questions[name]))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / rows < 600
    assert folder.finish()["n"] == rows + warm
    assert len(list(read_lines(tmp_path / "results.jsonl"))) == rows + warm


def test_a_resumed_folder_has_the_same_rows_in_the_same_order(tmp_path):
    questions = {f"q{n}": Question(question_id=f"q{n}", text=f"question {n}") for n in range(6)}
    (tmp_path / "trajectories.jsonl").touch()
    first = RunFolder(tmp_path, questions)
    first.resume(RolloutEngine(None, None))
    for question in questions.values():
        first.add(EpisodeJob(question), trajectory(question))
    first.close()
    before = list(read_lines(tmp_path / "results.jsonl"))
    (tmp_path / "results.jsonl").write_text("{}\n")
    again = RunFolder(tmp_path, questions)
    again.resume(RolloutEngine(None, None))
    again.close()
    assert list(read_lines(tmp_path / "results.jsonl")) == before
    assert again.keys == {(name, 0) for name in questions}
    assert [row.question_id for row in again.rows()] == list(questions)
