"""The DAG agent's tools, and how their arguments are read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from visor.env.graph import ActionGraph
from visor.env.prompts import fill
from visor.models.base import Tool
from visor.systems.prompts import DagPrompts
from visor.systems.replies import Call
from visor.types import Action, Answer, Invalid, Memorised, Search, Summary

ADD_SEARCH, SUMMARISE, ADD_ANSWER = "add_search_node", "summarize_and_memorize", "add_answer_node"
UNKNOWN_PICTURE = "unknown picture"
DEFAULT_PRIORITY = 3
_DIGITS = re.compile(r"\d+")


def dag_tools(prompts: DagPrompts, slots: Sequence[str] = ()) -> list[Tool]:
    """The three tools; with `slots` the summary also reports which of them are settled."""
    summary = {
        "summarize": _text(prompts.summarize_argument),
        "memorize": _list(
            _object(
                {
                    "picture": {"type": "integer", "description": prompts.picture_argument},
                    "priority_score": {
                        "type": "integer",
                        "minimum": 1,
                        "maximum": 5,
                        "description": prompts.priority_argument,
                    },
                }
            ),
            prompts.memorize_argument,
        ),
    }
    if slots:
        described = fill(prompts.settled_argument, slots=", ".join(slots))
        summary["settled"] = _list({"type": "string", "enum": list(slots)}, described)
    return [
        Tool(
            ADD_SEARCH,
            prompts.search_tool,
            _object(
                {
                    "id": _text(prompts.id_argument),
                    "parent_ids": _list({"type": "string"}, prompts.parents_argument),
                    "query": _text(prompts.query_argument),
                }
            ),
        ),
        Tool(SUMMARISE, prompts.summary_tool, _object(summary, required=["summarize"])),
        Tool(
            ADD_ANSWER,
            prompts.answer_tool,
            _object(
                {
                    "parent_ids": _list({"type": "string"}, prompts.answer_parents_argument),
                    "answer": _text(prompts.answer_argument),
                }
            ),
        ),
    ]


def read_action(call: Call, raw: str, graph: ActionGraph, labels: Sequence[str]) -> Action:
    """What a call means here; `labels` are the pages of the numbered pictures in view.

    A search waits for the summary of the one before it. An answer is taken at any time.
    """

    def invalid(reason: str) -> Invalid:
        return Invalid(reason=reason, raw=raw)

    if call.problem:
        return invalid(call.problem)
    if call.name == ADD_ANSWER:
        return (
            Answer(text=call.text("answer"))
            if "answer" in call.arguments
            else invalid("the answer is missing")
        )
    if call.name == ADD_SEARCH:
        if graph.pending is not None:
            return invalid(f"the last search has to be summarised first, with {SUMMARISE}")
        query = call.text("query")
        return Search(query=query) if query else invalid("the search query is empty")
    if call.name == SUMMARISE:
        if graph.pending is None:
            return invalid("there is no search to summarise")
        text = call.text("summarize")
        return (
            Summary(text=text, memorised=memorised(call, labels)[0])
            if text
            else invalid("the summary is empty")
        )
    return invalid(f"there is no tool {call.name!r}")


def memorised(call: Call, labels: Sequence[str]) -> tuple[list[Memorised], list[str]]:
    """The pages that a summary keeps, each once, and flags for what was named and is not in view.

    A picture may be named by its number, as text with a number in it, or alone without a priority.
    """
    kept: dict[str, Memorised] = {}
    unknown = False
    for item in _as_list(call.arguments.get("memorize")):
        fields = item if isinstance(item, dict) else {"picture": item}
        number = _number(fields.get("picture"))
        if number is None or not 1 <= number <= len(labels):
            unknown = True
            continue
        priority = _number(fields.get("priority_score"))
        clipped = DEFAULT_PRIORITY if priority is None else min(max(priority, 1), 5)
        kept[labels[number - 1]] = Memorised(page_id=labels[number - 1], priority=clipped)
    return list(kept.values()), [UNKNOWN_PICTURE] if unknown else []


def parent_ids(call: Call) -> list[str]:
    return [str(item) for item in _as_list(call.arguments.get("parent_ids"))]


def settled(call: Call) -> list[str]:
    return [str(item) for item in _as_list(call.arguments.get("settled"))]


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _number(value: Any) -> int | None:
    """A whole number, or the first digits of a text."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return int(value) if value == value and abs(value) < 1e6 else None
    digits = _DIGITS.search(str(value)[:100])
    return int(digits[0][:6]) if digits else None


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _list(items: dict[str, Any], description: str) -> dict[str, Any]:
    return {"type": "array", "items": items, "description": description}


def _object(properties: dict[str, Any], required: Sequence[str] | None = None) -> dict[str, Any]:
    needed = list(properties) if required is None else list(required)
    return {"type": "object", "properties": properties, "required": needed}
