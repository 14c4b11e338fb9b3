"""A deck of three pages and episodes over it, made by hand."""

from data.slide_world import Slide
from rewards.combine import score
from rewards.judge import RuleJudge
from rollout.results import result_row
from scripts.slide_metrics import Episode, make_episode
from visor.env.actions import parse_response
from visor.types import (
    Answer,
    Completion,
    Observation,
    ObservationKind,
    Question,
    Search,
    StopReason,
    Trajectory,
    Turn,
    text_message,
)

GOLD, OTHER, THIRD = "amber-fox.pdf#page=1", "amber-fox.pdf#page=2", "red-owl.pdf#page=1"
SLIDES = {
    GOLD: Slide(GOLD, "amber fox", (("profit", 4), ("tax", 2), ("rent", 7))),
    OTHER: Slide(OTHER, "amber fox", (("sales", 1), ("cash", 8), ("debt", 3))),
    THIRD: Slide(THIRD, "red owl", (("profit", 9), ("cost", 5), ("loans", 6))),
}
READ = {
    GOLD: "amber fox , profit 4 , tax 2 , rent 7 .",
    OTHER: "amber fox , sales 1 , cash 8 , debt 3 .",
    THIRD: "red owl , profit 9 , cost 5 , loans 6 .",
}
QUESTION = Question(
    question_id="amber-fox.pdf/profit",
    text="profit of amber fox",
    gold_answers=["4"],
    gold_page_ids=[GOLD],
    tags={"hop": "single"},
)


def search(thought: str = "search") -> str:
    return f"<think> {thought}</think><search> profit of amber fox</search>"


def answer(thought: str, text: str) -> str:
    return f"<think> {thought}</think><answer> {text}</answer>"


def trajectory(*steps: tuple[str, str | None], question: Question = QUESTION, sample: int = 0) -> Trajectory:
    """`steps`: (reply, page that the environment showed after it, or None). Scored by the rule judge."""
    turns, final = [], None
    for index, (reply, page) in enumerate(steps):
        parsed = parse_response(reply)
        kind = ObservationKind.PAGE if page else ObservationKind.INVALID
        seen = Observation(kind=kind, message=text_message("user", "o"), page_ids=[page] if page else [])
        if isinstance(parsed.action, Answer):
            final, seen = parsed.action.text, None
        is_search = isinstance(parsed.action, Search)
        turns.append(
            Turn(
                index=index,
                context=[],
                completion=Completion(text=reply),
                think=parsed.think,
                action=parsed.action,
                query="q" if is_search else None,
                observation=seen,
            )
        )
    made = Trajectory(
        question_id=question.question_id,
        question=question.text,
        sample_index=sample,
        turns=turns,
        answer=final,
        stop_reason=StopReason.ANSWER if final is not None else StopReason.MAX_TURNS,
    )
    made.reward = score(made, question, RuleJudge())
    return made


def episode(*steps: tuple[str, str | None], question: Question = QUESTION) -> Episode:
    made = trajectory(*steps, question=question)
    return make_episode(made, result_row(made, question), SLIDES)


VERIFIED = (
    (search(), GOLD),
    (search(f"{READ[GOLD]} profit 4 . the answer is 4 . verify it"), OTHER),
    (answer(f"{READ[OTHER]} confirmed . profit 4 . the answer is 4 .", "4"), None),
)
"""Δ = 1, both pages read exactly, the right answer."""
UNVERIFIED = ((search(), GOLD), (answer(f"{READ[GOLD]} profit 4 . the answer is 4 .", "4"), None))
