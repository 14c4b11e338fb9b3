"""A policy's reply → its thinking and its one action. Pure; linear in the length of the text.

Grammar: `<think>…</think>` and then one of `<search>…</search>`, `<bbox>[x1,y1,x2,y2]</bbox>`,
`<answer>…</answer>`. The reader walks over these tags once, from left to right; everything else is text.

- The reply ends at the first turn marker (`<|im_start|>`, `<|im_end|>`): what follows was not the policy's
  to write.
- Thinking ends at the first `</think>`; its opening tag may be missing. Text inside is never an action.
- A reply without any thinking has no action (VISOR, Table 4: the reasoning is mandatory).
- An action is complete when the next tag after its opening one closes it: actions do not nest. The first
  complete action after the thinking counts, and only it.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field
from typing import Literal

from visor.types import Action, Answer, Crop, Invalid, Search

BoxSpace = Literal["norm1000", "pixels"]

TAG = re.compile(r"<(/?)(think|search|bbox|answer)>")
TURN_MARKER = re.compile(r"<\|im_(?:start|end)\|>")
ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z][a-zA-Z0-9]{1,31});")
NUMBER = r"\s{0,8}([+-]?(?:[0-9]{1,6}(?:\.[0-9]{0,8})?|\.[0-9]{1,8}))\s{0,8}"
BOX = re.compile(r"\[" + ",".join([NUMBER] * 4) + r"\]")

CUT_OFF = "cut off"
NO_ACTION = "no action"
NO_THINKING = "no thinking"
MORE_THAN_ONE = "more than one action"
TAG_BEFORE_THINKING = "tag before the thinking"
THINK_NOT_OPENED = "thinking not opened"
SECOND_THINKING = "more than one thinking block"
STRAY_TAG = "stray or unclosed tag"
AFTER_TURN = "text after the end of the turn"
EMPTY_QUERY = "empty query"
BAD_BOX = "malformed box"


@dataclass(frozen=True)
class ParsedResponse:
    """What a reply means."""

    think: str
    """The first thinking block, stripped; for an unclosed one the text so far. "" when there is none."""
    action: Action
    format_ok: bool
    """False when `flags` is not empty."""
    flags: list[str] = field(default_factory=list)
    """The defects found, from the constants of this module, each once."""
    think_closed: bool = True
    """False when the thinking was cut off or missing."""


@dataclass(frozen=True)
class _Tag:
    name: str
    closing: bool
    start: int
    end: int


def parse_response(text: str, box_space: BoxSpace = "norm1000") -> ParsedResponse:
    """Read one reply of the policy; give it only text that the policy wrote.

    A reply without a complete action, with an empty query or with a malformed box gives `Invalid`; an empty
    answer is an answer. `box_space` is stamped on a crop.
    """
    flags: dict[str, None] = {}
    turn_end = TURN_MARKER.search(text)
    if turn_end:
        if text[turn_end.start() :].strip() != "<|im_end|>":
            flags[AFTER_TURN] = None
        reply = text[: turn_end.start()]
    else:
        reply = text
    tags = [_Tag(m[2], bool(m[1]), m.start(), m.end()) for m in TAG.finditer(reply)]
    think, closed, rest = _thinking(reply, tags, flags)
    found = _actions(reply, tags[rest:], flags) if closed else []
    action = _action(found, box_space, text, flags)
    return ParsedResponse(think, action, not flags, list(flags), closed)


def _thinking(reply: str, tags: list[_Tag], flags: dict[str, None]) -> tuple[str, bool, int]:
    """Return (thought, whether it is closed, index of the first tag after it)."""
    is_think = [i for i, tag in enumerate(tags) if tag.name == "think"]
    end = next((i for i in is_think if tags[i].closing), None)
    start = next((i for i in is_think if not tags[i].closing and (end is None or i < end)), None)
    before = len(tags) if start is None else start
    if start is not None and before > 0:
        flags[TAG_BEFORE_THINKING] = None
    if end is None:
        flags[CUT_OFF if start is not None else NO_THINKING] = None
        thought = reply[tags[start].end :] if start is not None else ""
        return thought.strip(), False, len(tags)
    if start is None:
        flags[THINK_NOT_OPENED] = None
    thought = reply[tags[start].end if start is not None else 0 : tags[end].start]
    return thought.strip(), True, end + 1


def _actions(reply: str, tags: list[_Tag], flags: dict[str, None]) -> list[tuple[str, str]]:
    """Return the complete actions among `tags` as (kind, content), in order."""
    found = []
    i = 0
    while i < len(tags):
        tag, following = tags[i], tags[i + 1] if i + 1 < len(tags) else None
        if tag.name == "think" and not tag.closing:
            flags[SECOND_THINKING] = None
            closes = (j for j in range(i, len(tags)) if tags[j].name == "think" and tags[j].closing)
            i = next(closes, len(tags))
        elif tag.closing:
            flags[STRAY_TAG] = None
        elif following and following.closing and following.name == tag.name:
            found.append((tag.name, reply[tag.end : following.start]))
            i += 1
        else:
            flags[STRAY_TAG if following else CUT_OFF] = None
        i += 1
    return found


def _action(found: list[tuple[str, str]], space: BoxSpace, raw: str, flags: dict[str, None]) -> Action:
    if not found:
        flags[NO_ACTION] = None
        return Invalid(reason=_why_no_action(flags), raw=raw)
    if len(found) > 1:
        flags[MORE_THAN_ONE] = None
    kind, content = found[0]
    if kind == "answer":
        return Answer(text=unescape(content.strip()))
    if kind == "search":
        query = content.strip()
        if query:
            return Search(query=query)
        flags[EMPTY_QUERY] = None
        return Invalid(reason="the search query is empty", raw=raw)
    box = parse_box(content)
    if box is None:
        flags[BAD_BOX] = None
        return Invalid(reason="the box is not of the form [x1,y1,x2,y2] with four plain numbers", raw=raw)
    return Crop(box=box, space=space)


def _why_no_action(flags: dict[str, None]) -> str:
    if NO_THINKING in flags:
        return "there was no reasoning between <think> and </think> before the action"
    if CUT_OFF in flags:
        return "the reply broke off before an action was complete"
    return "no complete action followed the reasoning"


def parse_box(text: str) -> tuple[float, float, float, float] | None:
    """Read `[x1,y1,x2,y2]`, whitespace allowed; None for anything else.

    Numbers are plain decimals of at most six digits before the point: no page has more pixels a side.
    """
    match = BOX.fullmatch(text.strip())
    if match is None:
        return None
    x1, y1, x2, y2 = map(float, match.groups())
    return x1, y1, x2, y2


def unescape(text: str) -> str:
    """Resolve complete HTML entities (`&amp;`, `&#60;`); a bare ampersand stays (`AT&T`, `&copy 2020`)."""
    return ENTITY.sub(lambda match: html.unescape(match[0]), text)
