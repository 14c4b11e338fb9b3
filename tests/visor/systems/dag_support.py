"""Replies of the DAG agent in both ways of making calls."""

from __future__ import annotations

import json

from systems_support import native

from visor.types import Completion


def add(node_id, query, parents=("root",), **more):
    return native("add_search_node", id=node_id, parent_ids=list(parents), query=query, **more)


def summarise(text, *kept, **more):
    """`kept`: (picture, priority)."""
    memorize = [{"picture": picture, "priority_score": priority} for picture, priority in kept]
    return native("summarize_and_memorize", summarize=text, memorize=memorize, **more)


def answer(text, parents=("root",)):
    return native("add_answer_node", parent_ids=list(parents), answer=text)


def as_written(completion: Completion) -> str:
    """A native reply as a model without tools writes it."""
    [call] = completion.tool_calls
    body = json.dumps({"name": call.name, "arguments": json.loads(call.arguments)}, ensure_ascii=False)
    return f"<think>{completion.text or 'so'}</think>\n<tool_call>\n{body}\n</tool_call>"


def graph_shown(context):
    """The nodes as the prompt shows them."""
    text = context[1].text
    start = text.index("as a graph:") + len("as a graph:")
    return json.JSONDecoder().raw_decode(text[start:].lstrip())[0]
