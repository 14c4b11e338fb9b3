"""One compact row a question and sample: what metrics, comparisons and tables are computed from."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from rollout.call_tokens import slot_calls, token_fields
from visor.types import (
    SCHEMA_VERSION,
    Answer,
    Crop,
    Invalid,
    Question,
    Record,
    Search,
    Summary,
    Trajectory,
    Turn,
)

RETRIEVED_FIRST = 5


class ResultRow(Record):
    """What one trajectory comes to; it can be recomputed from the trajectory and its question."""

    schema_version: int = SCHEMA_VERSION
    question_id: str
    sample_index: int = 0
    system: str
    seed: int = 0
    question: str
    gold_answers: list[str] = []
    gold_page_ids: list[str] = []
    answer_format: str = ""
    """Of the gold answer, where the benchmark gives one: Int, Float, Str, List or None."""
    tags: dict[str, Any] = {}
    answer: str | None = None
    """None = no answer was given."""
    stop_reason: str | None = None
    error: str = ""
    """`source: type: message` of a fault; empty = none."""
    judge: str = ""
    """Name of the judge that the verdict is of."""
    verdict: bool | None = None
    """The judge's; None = not asked, or no verdict."""
    score: float | None = None
    """The judge's score where it gives one: 0 to 1 of a benchmark's scorer, a grade of 1 to 5."""
    judged_as: str = ""
    """The short form of the answer that was scored, where a model made one; "" = the answer as it is."""
    reward: float | None = None
    """None = unscored."""
    unscored_reason: str = ""
    delta: int | None = None
    """Δ = T − t* of VISOR eq. 5; None = incomplete or no gold pages."""
    queries: list[str] = []
    """As sent to the retriever, in order."""
    shown_page_ids: list[str] = []
    """Pages that searches put into the context, in order."""
    admitted: list[str | None] = []
    """The page each search showed, the first of several; None = nothing new."""
    admitted_pages: list[list[str]] = []
    """All pages that each search put into the context, repeats of earlier searches included."""
    first_retrieved: list[str] | None = None
    """The first five pages that the retriever ranked for the first search; None in rows made before this was
    kept, [] without a search."""
    completed_searches: int | None = None
    """Searches that the retriever answered, not one that got a notice only; None in rows made before this
    was kept."""
    calls: int = 0
    """Policy calls that got a reply."""
    slot_calls: int = 0
    """Calls that the TAEC layer made for the question's slots; none of them is a policy call."""
    context_images: list[int] = []
    """Images in the context of each call."""
    image_bytes: list[int] | None = None
    """Base64 bytes of the pictures sent with each call; None where a client sends none."""
    new_tokens: int | None = None
    """Sampled tokens in all; None where an endpoint neither gives nor counts them."""
    prompt_tokens: int | None = None
    """Tokens of the prompts of all calls, pictures included, as the endpoint or the tokenizer counted them;
    None where they were not."""
    image_tokens: int | None = None
    """Tokens of all pictures of those prompts, one for 28 × 28 pixels; None where a client tells no sizes."""
    estimated_tokens: dict[str, int] = {}
    """By the rule of thumb of `visor.env.tokens`: `prompt_text` and `reply` of all calls, `images` at their
    largest, `slot_prompt` and `slot_reply` of the slot calls."""
    crops: int = 0
    """Turns with a crop action."""
    invalid_actions: int = 0
    format_defects: int = 0
    """Turns whose reply had defective tags or more than one action."""
    seconds: dict[str, float] = {}
    """Policy and retrieval time by stage as in VISOR's figure 4 (search, perception, verification, answer,
    other), and `wall`, the time from start to end, waiting for the batch included."""

    @property
    def searches(self) -> int:
        """Completed retrieval calls."""
        return len(self.queries) if self.completed_searches is None else self.completed_searches

    @property
    def finished(self) -> bool:
        """A non-empty answer was given."""
        return bool(self.answer and self.answer.strip())

    @property
    def failed(self) -> bool:
        """A fault, or no answer at all: it stays in every denominator, as wrong."""
        return bool(self.error) or self.answer is None

    @property
    def unjudged(self) -> bool:
        """There is an answer that the judge gave no verdict on."""
        return not self.error and self.finished and self.verdict is None

    @property
    def correct(self) -> bool:
        return self.verdict is True

    @property
    def complete(self) -> bool | None:
        """All gold pages were shown; None = the question has none."""
        return set(self.gold_page_ids) <= set(self.shown_page_ids) if self.gold_page_ids else None

    @property
    def hit(self) -> bool | None:
        """At least one gold page was shown; None = the question has none."""
        return bool(set(self.gold_page_ids) & set(self.shown_page_ids)) if self.gold_page_ids else None


def result_row(trajectory: Trajectory, question: Question) -> ResultRow:
    """Condense a trajectory. ValueError when it belongs to another question."""
    if trajectory.question_id != question.question_id:
        raise ValueError(f"trajectory of {trajectory.question_id!r} paired with {question.question_id!r}")
    reward, error = trajectory.reward, trajectory.error
    searches = [turn for turn in trajectory.turns if isinstance(turn.action, Search)]
    turns = [turn for turn in trajectory.turns if not turn.by_system]
    return ResultRow(
        question_id=trajectory.question_id,
        sample_index=trajectory.sample_index,
        system=trajectory.system,
        seed=trajectory.seed,
        question=question.text,
        gold_answers=question.gold_answers,
        gold_page_ids=question.gold_page_ids,
        answer_format=question.answer_format,
        tags=question.tags,
        answer=trajectory.answer,
        stop_reason=trajectory.stop_reason.value if trajectory.stop_reason else None,
        error=f"{error.source}: {error.type}: {error.message}" if error else "",
        judge=reward.judge if reward else "",
        verdict=reward.verdict if reward else None,
        score=reward.score if reward else None,
        judged_as=reward.judged_as if reward else "",
        reward=reward.total if reward else None,
        unscored_reason=reward.unscored_reason if reward else "not scored",
        delta=reward.delta if reward else None,
        queries=[turn.query or "" for turn in searches],
        shown_page_ids=trajectory.shown_page_ids,
        admitted=[_admitted(turn) for turn in searches],
        admitted_pages=[turn.observation.page_ids if turn.observation else [] for turn in searches],
        first_retrieved=first_retrieved(trajectory),
        completed_searches=completed_searches(trajectory),
        calls=len(turns),
        slot_calls=slot_calls(trajectory),
        context_images=[sum(len(message.images) for message in turn.context) for turn in turns],
        image_bytes=_image_bytes(turns),
        **token_fields(trajectory),
        crops=sum(isinstance(turn.action, Crop) for turn in turns),
        invalid_actions=sum(isinstance(turn.action, Invalid) for turn in turns),
        format_defects=sum(not turn.format_ok for turn in turns),
        seconds=_seconds(trajectory),
    )


def first_retrieved(trajectory: Trajectory) -> list[str]:
    """The first five pages ranked for the first search, whether or not they were shown."""
    searches = (turn for turn in trajectory.turns if isinstance(turn.action, Search))
    first = next(searches, None)
    return [page_id for page_id, _ in first.candidates[:RETRIEVED_FIRST]] if first else []


def completed_searches(trajectory: Trajectory) -> int:
    return sum(map(answered_by_retriever, trajectory.turns))


def answered_by_retriever(turn: Turn) -> bool:
    """Whether it is a search that the retriever answered: it found pages, or at least took its time. A query
    that got a notice only, as ReAct's repeated ones, is none."""
    searched = isinstance(turn.action, Search) and turn.observation is not None
    return searched and bool(turn.candidates or turn.retrieval_seconds)


def _admitted(turn: Turn) -> str | None:
    pages = turn.observation.page_ids if turn.observation else []
    return pages[0] if pages else None


def _image_bytes(turns: list[Turn]) -> list[int] | None:
    sent = [turn.completion.image_bytes for turn in turns if turn.completion.image_bytes is not None]
    return sent if sent and len(sent) == len(turns) else None


def _seconds(trajectory: Trajectory) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for turn in trajectory.turns:
        seconds[_stage(turn)] += turn.completion.seconds + turn.retrieval_seconds
    if "wall_seconds" in trajectory.meta:
        seconds["wall"] = trajectory.meta["wall_seconds"]
    return {stage: round(value, 4) for stage, value in seconds.items()}


def _stage(turn: Turn) -> str:
    """The stage of figure 4 of VISOR that a turn counts under."""
    match turn.action:
        case Search():
            return "verification" if turn.is_verification else "search"
        case Crop() | Summary():
            return "perception"
        case Answer():
            return "answer"
        case _:
            return "other"
