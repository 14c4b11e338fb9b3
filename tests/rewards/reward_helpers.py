"""Trajectories built by hand for reward tests."""

import json
from pathlib import Path

import pytest

from visor.types import (
    Answer,
    Completion,
    Crop,
    ErrorRecord,
    Invalid,
    Observation,
    ObservationKind,
    Question,
    Search,
    StopReason,
    Trajectory,
    Turn,
    text_message,
)


def case_file(name: str) -> Path:
    path = Path(__file__).parents[3] / "shared" / "cases" / "files" / name
    if not path.is_file():
        pytest.skip(f"case file {name} is not on this machine")
    return path


def turn(index: int, action, kind=None, page=None) -> Turn:
    observation = None
    if kind:
        observation = Observation(
            kind=kind, message=text_message("user", "o"), page_ids=[f"d#page={page}"] if page else []
        )
    return Turn(
        index=index, context=[], completion=Completion(text="t"), action=action, observation=observation
    )


def trajectory(script: str, answer: str | None = None, **fields) -> Trajectory:
    """`script`: one character a turn. A digit: a search that shows that page; n: one that shows nothing new;
    c: a crop of page 9; x: an invalid action."""
    turns = []
    for i, step in enumerate(script):
        if step.isdigit():
            turns.append(turn(i, Search(query="q"), ObservationKind.PAGE, step))
        elif step == "n":
            turns.append(turn(i, Search(query="q"), ObservationKind.NO_NEW_PAGE))
        elif step == "c":
            turns.append(turn(i, Crop(box=(0, 0, 9, 9), space="norm1000"), ObservationKind.CROP, 9))
        else:
            turns.append(turn(i, Invalid(reason="r", raw="t"), ObservationKind.INVALID))
    stop = StopReason.MAX_TURNS
    if answer is not None:
        turns.append(turn(len(turns), Answer(text=answer)))
        stop = StopReason.ANSWER
    record = {"question_id": "q1", "question": "Q?", "turns": turns, "answer": answer, "stop_reason": stop}
    return Trajectory(**(record | fields))


def question(gold_pages: str = "1", gold_answers=("12",)) -> Question:
    return Question(
        question_id="q1",
        text="Q?",
        gold_answers=list(gold_answers),
        gold_page_ids=[f"d#page={page}" for page in gold_pages],
    )


def fault(source="environment") -> dict:
    error = ErrorRecord(source=source, type="ConnectionError", message="gone")
    return {"error": error, "stop_reason": StopReason.ERROR}


def load_json(name: str):
    return json.loads(case_file(name).read_text(encoding="utf-8"))
