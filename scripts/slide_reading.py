"""What a policy of the slide world says about the pages it is shown, held against what stands on them.

Pure functions over recorded trajectories and the truth of the pages (`slides.jsonl`). A reply counts only
when it could be carried out: an invalid one reads nothing and claims nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from data.slide_expert import describe, parse_question
from data.slide_world import Slide
from rewards.answer import matches_any
from rewards.honesty import is_refusal
from rollout.results import ResultRow
from visor.types import Answer, Invalid, ObservationKind, Question, Trajectory, Turn


class Says(StrEnum):
    """What a reply says about the asked fact."""

    VALUE = "value"
    ABSENT = "absent"
    NEITHER = "neither"


class Cause(StrEnum):
    """Why an episode does not end with the right answer after complete retrieval."""

    NO_ANSWER = "no answer"
    CLAIMED = "claimed on a page without the fact"
    NEVER_COMPLETE = "never complete"
    MISREAD = "misread gold page"
    VERIFICATION = "after a verification page"
    OTHER = "other"


@dataclass(frozen=True)
class PageReply:
    """The reply to one shown page, of one question."""

    question_id: str
    page_id: str
    turn_index: int
    gold: bool
    """The page is a gold page of the question."""
    before_gold: bool
    """No gold page had been shown before this one."""
    exact: bool
    """The reply was carried out and its thought starts with the page in words."""
    says: Says
    values: frozenset[str]
    """Every value claimed for the asked topic: in the thought, and as the answer."""


def page_replies(trajectory: Trajectory, row: ResultRow, slides: Mapping[str, Slide]) -> list[PageReply]:
    """The replies of a trajectory that follow a shown page, in order.

    A page without a reply (the episode ended) is left out. ValueError for a page that `slides` lacks.
    """
    gold, replies, gold_shown = set(row.gold_page_ids), [], False
    for page_id, turn in _shown_before(trajectory):
        if page_id not in slides:
            raise ValueError(
                f"page {page_id!r} is not among the slides; give slides.jsonl of the run's split"
            )
        valid = not isinstance(turn.action, Invalid)
        says, values = said(turn, asked_topics(row))
        replies.append(
            PageReply(
                question_id=row.question_id,
                page_id=page_id,
                turn_index=turn.index,
                gold=page_id in gold,
                before_gold=not gold_shown,
                exact=valid and starts_with(turn.think, describe(slides[page_id])),
                says=says,
                values=values,
            )
        )
        gold_shown = gold_shown or page_id in gold
    return replies


def _shown_before(trajectory: Trajectory) -> Iterator[tuple[str, Turn]]:
    """(page, reply) for each reply whose preceding observation showed a page."""
    for before, turn in pairwise(trajectory.turns):
        seen = before.observation
        if seen is not None and seen.kind == ObservationKind.PAGE:
            yield seen.page_ids[-1], turn


def starts_with(thought: str, description: str) -> bool:
    """The thought's first words are the description's; whitespace does not matter."""
    words = description.split()
    return thought.split()[: len(words)] == words


def asked_topics(row: ResultRow) -> list[str]:
    """["profit"] of "profit of amber fox"."""
    return parse_question(Question(question_id=row.question_id, text=row.question))[0]


def said(turn: Turn, topics: list[str]) -> tuple[Says, frozenset[str]]:
    """What a reply says about the asked topic, and the values it claims for it.

    The description that opens a thought ends at its first full stop; what follows is about the question. A
    reply that names a value anywhere there, or answers with one, claims it, even when it also says that the
    topic is absent. With several topics (multi-hop) only an answer is a claim.
    """
    if isinstance(turn.action, Invalid):
        return Says.NEITHER, frozenset()
    words = turn.think.split()
    rest = words[words.index(".") + 1 :] if "." in words else words
    text = " " + " ".join(rest) + " "
    claims = set()
    if len(topics) == 1:
        claims |= {after for word, after in pairwise(rest) if word == topics[0] and after.isdigit()}
        claims |= {b for a, b in pairwise(rest) if a == "is" and b.isdigit()}
    refuses = any(f" {topic} not found " in text for topic in topics)
    if isinstance(turn.action, Answer):
        answer = turn.action.text.strip()
        refuses = refuses or is_refusal(answer)
        if answer and not is_refusal(answer):
            claims.add(answer)
    if claims:
        return Says.VALUE, frozenset(claims)
    return (Says.ABSENT if refuses else Says.NEITHER), frozenset()


def claims_right(reply: PageReply, row: ResultRow) -> bool:
    """The reply claims the right value and no other."""
    return bool(reply.values) and all(matches_any(value, row.gold_answers) for value in reply.values)


def correct_and_complete(row: ResultRow) -> bool:
    """Accuracy with completeness: a right answer after all gold pages were shown; a lucky guess is none."""
    return row.correct and bool(row.complete)


def cause(row: ResultRow, replies: list[PageReply]) -> Cause | None:
    """Why a single-hop episode failed (`correct_and_complete` does not hold); None when it did not.

    The earliest thing that went wrong and was not put right: a value claimed before the gold page counts when
    the gold page did not correct it, a page after the gold one when the gold page had been read right.
    """
    if correct_and_complete(row):
        return None
    if row.failed or not row.finished:
        return Cause.NO_ANSWER
    claimed = any(r.says == Says.VALUE and r.before_gold and not r.gold for r in replies)
    at_gold = [r for r in replies if r.gold]
    if at_gold and claims_right(at_gold[0], row):
        later = any(r.turn_index > at_gold[0].turn_index for r in replies)
        return Cause.VERIFICATION if later else Cause.OTHER
    if claimed:
        return Cause.CLAIMED
    return Cause.MISREAD if at_gold else Cause.NEVER_COMPLETE
