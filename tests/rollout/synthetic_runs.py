"""Synthetic trajectories with given counts, and runs of them, for the tests of the analyses."""

from rollout.analyses.study import Run
from rollout.results import ResultRow, result_row
from visor.types import (
    Answer,
    Completion,
    ImagePart,
    ImageRef,
    Message,
    Observation,
    ObservationKind,
    Question,
    RewardBreakdown,
    Search,
    StopReason,
    TextPart,
    Trajectory,
    Turn,
)

GOLD = "gold.pdf#page=1"


def page(number: int) -> str:
    return f"other.pdf#page={number}"


def trajectory(question_id, *, searches=1, hit=True, right=True, sample=0, first=False, **meta) -> Trajectory:
    """A trajectory of so many searches; the last one shows the gold page when it is a hit.

    `first`: the first search retrieves the gold page among its five, whether or not it is shown.
    """
    turns = []
    for index in range(searches):
        shown = GOLD if hit and index == searches - 1 else page(index + 1)
        ranked = [shown, *([GOLD] if first and index == 0 and shown != GOLD else [])]
        message = Message(role="user", content=[TextPart(text="page")])
        turns.append(
            Turn(
                index=index,
                context=[],
                completion=Completion(text="search"),
                action=Search(query=f"query {index}"),
                query=f"query {index}",
                candidates=[(page_id, 1.0) for page_id in ranked],
                observation=Observation(kind=ObservationKind.PAGE, message=message, page_ids=[shown]),
            )
        )
    turns.append(
        Turn(index=searches, context=[], completion=Completion(text="answer"), action=Answer(text="a"))
    )
    return Trajectory(
        question_id=question_id,
        question="?",
        sample_index=sample,
        turns=turns,
        answer="a",
        stop_reason=StopReason.ANSWER,
        reward=RewardBreakdown(total=float(right), verdict=right, judge="rule"),
        meta=meta,
    )


def row(question_id, *, gold=True, tags=None, **fields) -> ResultRow:
    """The result row of a synthetic trajectory."""
    question = Question(
        question_id=question_id, text="?", gold_page_ids=[GOLD] if gold else [], tags=tags or {}
    )
    return result_row(trajectory(question_id, **fields), question)


def run(name, rows, **made_with) -> Run:
    """A run of one sample a question."""
    return Run(name=name, questions=[[item] for item in rows], **made_with)


def counted(n, hits, hits_right, misses_right, prefix="q", **fields) -> list[ResultRow]:
    """n rows: so many hits, of them so many right, and so many of the misses right."""
    return [
        row(
            f"{prefix}{index}",
            hit=index < hits,
            right=index < hits_right if index < hits else index - hits < misses_right,
            **fields,
        )
        for index in range(n)
    ]


def calls(images: list[int], size: int = 1) -> list[Turn]:
    """Turns whose contexts hold so many pictures, of `size` base64 bytes each."""
    ref = ImageRef(page_id=GOLD, min_pixels=784, max_pixels=784)
    return [
        Turn(
            index=index,
            context=[Message(role="user", content=[ImagePart(image=ref)] * count)],
            completion=Completion(text="so", image_bytes=count * size),
            action=Answer(text="a"),
        )
        for index, count in enumerate(images)
    ]
