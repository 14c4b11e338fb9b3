"""Replies of a model that judges → verdicts: a label or a grade in a tag, or no verdict at all."""

from __future__ import annotations

import re
from dataclasses import dataclass

TAGGED = re.compile(r"<judge>([^<]*)</judge>", re.IGNORECASE)
GRADE = re.compile(r"\s*([1-5])(?:\s*/\s*5)?\s*")
RIGHT_FROM = 4
"""Grades from here on count as right (ViDoRAG)."""
LABEL = re.compile(r"\s*(true|false)\b(?!\s*(?:or|and|/|\|)\s*(?:true|false)\b)", re.IGNORECASE)


@dataclass(frozen=True)
class Verdict:
    """A judge's word on one answer."""

    value: bool | None
    """None: no verdict, neither right nor wrong."""
    raw: str = ""
    """The reply it was read from; "" when nobody was asked."""
    error: str = ""
    """Why there is no verdict."""
    score: float | None = None
    """What a judge that gives more than right or wrong gives: 0 to 1 of a scorer, a grade of 1 to 5."""
    judged_as: str = ""
    """The short form of the answer that was scored, where a model made one; "" = the answer as it is."""


def parse_verdict(reply: str | None) -> bool | None:
    """Read `<judge>True|False</judge>`, in any case; the last one counts. None when there is no verdict.

    The label must come first inside the tag and stand alone as a word; "True or False" is none.
    """
    tagged = TAGGED.findall(reply or "")
    label = LABEL.match(tagged[-1]) if tagged else None
    return label[1].lower() == "true" if label else None


def parse_grade(reply: str | None) -> int | None:
    """Read `<judge>4</judge>` or `<judge>4/5</judge>`, a whole grade from 1 to 5 with nothing beside it; the
    last tag counts. None when there is no grade."""
    tagged = TAGGED.findall(reply or "")
    grade = GRADE.fullmatch(tagged[-1]) if tagged else None
    return int(grade[1]) if grade else None


def read_verdict(reply: str) -> Verdict:
    """The verdict of a reply to the prompts `correctness` and `honesty`; its value is None without one."""
    return Verdict(parse_verdict(reply), reply)


def read_grade(reply: str) -> Verdict:
    """The verdict of a reply to the prompt `grade`: the grade is its score."""
    grade = parse_grade(reply)
    return Verdict(None, reply) if grade is None else Verdict(grade >= RIGHT_FROM, reply, score=float(grade))
