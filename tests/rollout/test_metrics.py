import json
from pathlib import Path

import pytest

from rollout.metrics import compute_metrics, headline, summarise
from rollout.results import ResultRow, result_row
from rollout.tables import format_table, metrics_table
from visor.types import (
    Answer,
    Completion,
    Crop,
    ErrorRecord,
    ImagePart,
    ImageRef,
    Invalid,
    Message,
    Observation,
    ObservationKind,
    Question,
    RewardBreakdown,
    Search,
    StopReason,
    Trajectory,
    Turn,
    text_message,
)

CASES = Path(__file__).parents[2].parent / "shared" / "cases" / "files"


def row(question_id: str, **fields) -> ResultRow:
    return ResultRow(question_id=question_id, system="visor", question="q ?", **fields)


def test_failed_questions_stay_in_the_denominator():
    """Case H1."""
    if not CASES.exists():
        pytest.skip("the shared cases folder is absent")
    records = [json.loads(line) for line in (CASES / "eval_10.jsonl").read_text().splitlines()]
    rows = [
        row(record["id"], error=f"environment: Fault: {record['error']}")
        if record["status"] == "error"
        else row(record["id"], answer="a", verdict=record["correct"])
        for record in records
    ]
    metrics = headline(rows)
    assert (metrics["n"], metrics["failed"], metrics["faults"]) == (10, 2, 2)
    assert metrics["accuracy"] == pytest.approx(0.60)
    assert metrics["accuracy_not_failed"] == pytest.approx(0.75)


def test_an_episode_without_an_answer_is_failed_but_no_fault():
    metrics = headline([row("a", stop_reason="length"), row("b", answer="", stop_reason="answer")])
    assert (metrics["failed"], metrics["faults"], metrics["finish_rate"]) == (1, 0, 0.0)


def test_an_unjudged_answer_is_wrong_and_counted():
    metrics = headline([row("a", answer="x"), row("b", answer="x", verdict=True, reward=1.0)])
    assert (metrics["accuracy"], metrics["unjudged"], metrics["unscored"]) == (0.5, 1, 1)
    assert metrics["mean_reward"] == 1.0


def test_hand_worked_retrieval_figures():
    gold = {"gold_page_ids": ["d#page=1", "d#page=2"]}
    rows = [
        row("both", **gold, shown_page_ids=["d#page=2", "d#page=1"], queries=["a", "b"], delta=0, answer="x"),
        row("half", **gold, shown_page_ids=["d#page=1"], queries=["a"], answer="x", verdict=True),
        row(
            "verified",
            **gold,
            shown_page_ids=["d#page=1", "d#page=2", "d#page=3"],
            queries=["a", "b", "c"],
            delta=1,
            answer="x",
            verdict=True,
        ),
        row("over", **gold, shown_page_ids=["d#page=1", "d#page=2"], queries=["a"] * 4, delta=2, answer="x"),
        row("no gold", queries=[], shown_page_ids=[], crops=2, invalid_actions=1, answer="x"),
    ]
    metrics = headline(rows)
    assert metrics["n_gold"] == 4
    assert metrics["completeness"] == 3 / 4
    assert metrics["hit_rate"] == 1.0
    assert metrics["no_verification_share"] == 1 / 4
    assert metrics["verification_share"] == 1 / 4
    assert metrics["over_search_share"] == 1 / 4
    assert metrics["accuracy"] == 2 / 5
    assert metrics["accuracy_when_complete"] == 1 / 3
    assert metrics["mean_searches"] == (2 + 1 + 3 + 4 + 0) / 5
    assert metrics["mean_pages"] == (2 + 1 + 3 + 2 + 0) / 5
    assert metrics["box_usage"] == metrics["invalid_action_rate"] == metrics["no_search_share"] == 1 / 5


def test_context_images_are_averaged_over_calls_not_rows():
    metrics = headline([row("a", context_images=[0, 1, 2]), row("b", context_images=[0])])
    assert metrics["mean_context_images"] == 3 / 4
    assert metrics["max_context_images"] == 2


def test_empty_denominators_are_none_and_valid_json():
    metrics = summarise([])
    assert metrics["accuracy"] is None
    assert metrics["completeness"] is None
    json.dumps(metrics, allow_nan=False)
    assert "–" in metrics_table(metrics)


def test_by_tag_and_list_tags():
    rows = [
        row("a", tags={"hop": "single", "evidence_sources": ["Chart", "Table"]}, answer="x", verdict=True),
        row("b", tags={"hop": "multi", "evidence_sources": ["Chart"]}, answer="x"),
        row("c", tags={"hop": "single", "split": "test"}, answer="x"),
    ]
    by_tag = summarise(rows)["by_tag"]
    assert by_tag["hop"]["single"]["n"] == 2
    assert by_tag["hop"]["single"]["accuracy"] == 0.5
    assert by_tag["evidence_sources"]["Chart"]["n"] == 2
    assert by_tag["evidence_sources"]["Table"]["accuracy"] == 1.0
    assert "split" not in by_tag, "a tag with one value says nothing"


def test_tags_with_an_underscore_are_no_classes():
    rows = [row(name, tags={"_doc_id": name, "_answer_list": [name], "kind": name}) for name in ("a", "b")]
    assert list(summarise(rows)["by_tag"]) == ["kind"]


def page_message(page_id: str) -> Message:
    ref = ImageRef(page_id=page_id, min_pixels=784, max_pixels=784)
    return Message(role="user", content=[ImagePart(image=ref)])


def make_trajectory() -> tuple[Trajectory, Question]:
    """Search, crop, an invalid reply, a verification search with nothing new, an answer."""
    question = Question(
        question_id="q1", text="how many ?", gold_answers=["3"], gold_page_ids=["d#page=4"], tags={"hop": "s"}
    )
    page = page_message("d#page=4")
    seen = Observation(kind=ObservationKind.PAGE, message=page, page_ids=["d#page=4"])
    nothing = Observation(kind=ObservationKind.NO_NEW_PAGE, message=text_message("user", "none"))
    wrong = Observation(kind=ObservationKind.INVALID, message=text_message("user", "invalid"))
    crop = Observation(kind=ObservationKind.CROP, message=page, page_ids=["d#page=4"], crop=(0, 0, 9, 9))
    steps = [
        (Search(query="a"), seen, [], {"query": "a", "retrieval_seconds": 0.5}),
        (Crop(box=(0, 0, 500, 500), space="norm1000"), crop, [page], {}),
        (Invalid(reason="no action", raw="?"), wrong, [page, page], {"format_ok": False}),
        (Search(query="b"), nothing, [page], {"query": "b", "is_verification": True}),
        (Answer(text="3"), None, [], {}),
    ]
    turns = [
        Turn(
            index=i,
            context=context,
            completion=Completion(text="r", token_ids=[1, 2], seconds=1.0),
            action=action,
            observation=observation,
            **more,
        )
        for i, (action, observation, context, more) in enumerate(steps)
    ]
    trajectory = Trajectory(
        question_id="q1",
        question=question.text,
        turns=turns,
        answer="3",
        stop_reason=StopReason.ANSWER,
        reward=RewardBreakdown(total=1.0, verdict=True, delta=1, judge="rule"),
    )
    return trajectory, question


def test_result_row_of_a_trajectory():
    trajectory, question = make_trajectory()
    result = result_row(trajectory, question)
    assert result.queries == ["a", "b"]
    assert result.admitted == ["d#page=4", None]
    assert result.shown_page_ids == ["d#page=4"]
    assert result.context_images == [0, 1, 2, 1, 0]
    assert (result.calls, result.crops, result.invalid_actions, result.format_defects) == (5, 1, 1, 1)
    assert result.new_tokens == 10
    assert result.seconds == {
        "search": 1.5,
        "perception": 1.0,
        "other": 1.0,
        "verification": 1.0,
        "answer": 1.0,
    }
    assert result.correct
    assert result.complete
    assert not result.failed
    metrics = compute_metrics([trajectory], [question])
    assert (metrics["accuracy"], metrics["verification_share"], metrics["mean_context_images"]) == (1, 1, 0.8)


def test_result_row_of_a_fault_and_of_the_wrong_question():
    trajectory, question = make_trajectory()
    trajectory.error = ErrorRecord(source="environment", type="OSError", message="retriever down")
    trajectory.answer, trajectory.reward = None, None
    result = result_row(trajectory, question)
    assert result.error == "environment: OSError: retriever down"
    assert result.failed
    assert result.reward is None
    with pytest.raises(ValueError, match="paired with"):
        result_row(trajectory, question.model_copy(update={"question_id": "q2"}))


def test_format_table():
    assert (
        format_table(("a", "b"), [("x", 0.5), ("long", None)]) == "a     b\n----  -----\nx     0.500\nlong  –"
    )
    assert "a\\|b" in format_table(("h",), [("a|b",)], "markdown")
