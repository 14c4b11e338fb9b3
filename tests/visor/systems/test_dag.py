"""The DAG agent: the graph, the prompt made anew, the pictures kept, and how a question ends."""

from __future__ import annotations

import json

import pytest
from dag_support import add, answer, as_written, graph_shown, summarise
from systems_support import CAPTIONS, QUESTION, Replies, Store, WordRetriever, native, solve

from visor.env.graph import ActionGraph, PlainGraphPolicy
from visor.systems.dag_calls import UNKNOWN_PICTURE
from visor.types import Answer, Completion, Invalid, ObservationKind, Search, StopReason, Summary, ToolCall

SCRIPT = [
    add("s1", "blue bridge"),
    summarise("The overview has no height.", (1, 2), (3, 5)),
    add("s2", "height of the tower", ["s1"]),
    summarise("Page 2 gives 9.", (3, 4)),
    answer("9", ["s2"]),
]


def run(*replies, takes_tools=True, **loop):
    client = Replies(*replies, takes_tools=takes_tools)
    return solve("dag", client, **loop), client


class TestARun:
    def test_turn_by_turn(self):
        trajectory, client = run(*SCRIPT, pages_per_search=3)
        assert (trajectory.answer, trajectory.stop_reason) == ("9", StopReason.ANSWER)
        kinds = [type(turn.action) for turn in trajectory.turns]
        assert kinds == [Search, Summary, Search, Summary, Answer]
        assert [tool.name for tool in client.requests[0].tools] == [
            "add_search_node", "summarize_and_memorize", "add_answer_node",
        ]  # fmt: skip
        first, second, third = (trajectory.turns[i].context for i in (0, 2, 4))
        assert [len(context) for context in (first, second, third)] == [2, 2, 2]
        assert graph_shown(first) == [{"id": "root", "question": QUESTION.text}]
        assert graph_shown(third)[1:] == [
            {
                "id": "s1",
                "parents": ["root"],
                "query": "blue bridge",
                "summary": "The overview has no height.",
            },
            {"id": "s2", "parents": ["s1"], "query": "height of the tower", "summary": "Page 2 gives 9."},
        ]
        assert trajectory.meta["graph"]["answer"] == {"parents": ["s2"], "answer": "9"}
        assert trajectory.meta["evidence_policy"] == {"name": "none"}
        assert trajectory.meta["protocol"] == {"name": "native"}

    def test_a_search_shows_numbered_pages_that_are_summarised_before_anything_else(self):
        trajectory, _ = run(*SCRIPT, pages_per_search=3)
        searched = trajectory.turns[0]
        assert searched.observation.page_ids == ["a#page=1", "b#page=1", "a#page=2"]
        parts = searched.observation.message.content
        labels = [part.text for part in parts if part.type == "text" and part.text.startswith("Picture")]
        assert labels == ["Picture 1:", "Picture 2:", "Picture 3:"]
        assert {ref.max_pixels for ref in searched.observation.message.images} == {300_000}
        assert trajectory.turns[1].context[:2] == searched.context
        assert trajectory.turns[1].context[3] == searched.observation.message
        assert trajectory.turns[1].observation is None
        # The second search goes on counting after the two pictures shown again, and skips what was seen.
        again = trajectory.turns[2]
        assert [ref.page_id for ref in again.context[1].images] == ["a#page=1", "a#page=2"]
        assert "Picture 3:" in again.observation.message.text
        assert not set(again.observation.page_ids) & set(searched.observation.page_ids)

    def test_kept_pictures_share_the_budget_evenly_and_the_last_ones_are_shown(self):
        trajectory, _ = run(*SCRIPT, pages_per_search=3)
        memory = trajectory.turns[4].context[1].images
        assert [ref.page_id for ref in memory] == ["a#page=1", "a#page=2", "b#page=3"]
        assert [ref.max_pixels for ref in memory] == [200_000] * 3
        two, _ = run(*SCRIPT, pages_per_search=3, memory_images=2, memory_pixels=100_000)
        memory = two.turns[4].context[1].images
        assert [(ref.page_id, ref.max_pixels) for ref in memory] == [
            ("a#page=2", 50_000),
            ("b#page=3", 50_000),
        ]
        none, _ = run(*SCRIPT, memory_images=0)
        assert not none.turns[4].context[1].images

    def test_the_record_of_the_graph(self):
        trajectory, _ = run(*SCRIPT, pages_per_search=3)
        nodes = trajectory.meta["graph"]["nodes"]
        assert nodes[1] == {
            "id": "s1",
            "parents": ["root"],
            "query": "blue bridge",
            "summary": "The overview has no height.",
            "pages": ["a#page=1", "b#page=1", "a#page=2"],
            "memory": {"a#page=1": 2, "a#page=2": 5},
        }
        json.dumps(trajectory.meta)

    def test_the_same_in_text(self):
        native_run, _ = run(*SCRIPT, pages_per_search=3)
        written, client = run(*map(as_written, SCRIPT), takes_tools=False, pages_per_search=3)
        assert written.answer == "9"
        assert written.meta["graph"] == native_run.meta["graph"]
        assert written.meta["protocol"] == {"name": "text", "reason": "the client takes no tools"}
        assert [type(t.action) for t in written.turns] == [type(t.action) for t in native_run.turns]
        assert not client.requests[0].tools
        system = client.requests[0].messages[0].text
        assert '{"name": "add_search_node"' in system
        assert "<tool_call>" in system
        assert written.turns[1].context[2].text == as_written(SCRIPT[0])
        assert all(message.role != "tool" for turn in written.turns for message in turn.context)


class TestRules:
    def test_a_second_search_waits_for_the_summary(self):
        trajectory, _ = run(SCRIPT[0], add("s2", "gate"), *SCRIPT[1:])
        refused = trajectory.turns[1]
        assert isinstance(refused.action, Invalid)
        assert "summarised first" in refused.action.reason
        assert refused.observation.kind == ObservationKind.INVALID
        assert len(trajectory.turns[2].context) == 6
        assert trajectory.answer == "9"

    @pytest.mark.parametrize(
        ("reply", "reason"),
        [
            (summarise("x"), "no search to summarise"),
            (add("s", "   "), "query is empty"),
            (native("add_answer_node", parent_ids=["root"]), "answer is missing"),
            (native("zoom", picture=1), "no tool 'zoom'"),
            (Completion(text="hm"), "called no tool"),
            (Completion(text="", tool_calls=[ToolCall(call_id="c", name="x", arguments="{")]), "not a JSON"),
        ],
    )
    def test_what_cannot_be_carried_out_is_told(self, reply, reason):
        trajectory, _ = run(reply, answer("9"))
        assert reason in trajectory.turns[0].action.reason
        assert reason in trajectory.turns[0].observation.message.text
        assert trajectory.answer == "9"

    def test_an_empty_summary_is_refused_and_an_answer_is_taken_at_any_time(self):
        trajectory, _ = run(SCRIPT[0], summarise(" "), answer("9"))
        assert "summary is empty" in trajectory.turns[1].action.reason
        assert trajectory.answer == "9"

    def test_a_search_that_brings_nothing_new_is_summarised_too(self):
        trajectory, _ = run(
            SCRIPT[0], SCRIPT[1], add("s2", "blue bridge"), summarise("Nothing new."), answer("unknown")
        )
        again = trajectory.turns[2]
        assert again.observation.kind == ObservationKind.NO_NEW_PAGE
        assert not again.observation.message.images
        assert again.candidates
        assert trajectory.meta["graph"]["nodes"][2]["pages"] == []

    def test_small_mistakes_are_mended_and_flagged(self):
        trajectory, _ = run(
            native("add_search_node", query="blue bridge", parent_ids="nowhere"),
            summarise("x", (9, 5), (1, 9)),
            add("root", "tower height", ["search_1", "search_1"]),
            native("summarize_and_memorize", summarize="y", memorize=["Picture 2", {"picture": "1"}, None]),
            answer("9"),
        )
        assert trajectory.turns[0].flags == ["unknown parent"]
        assert trajectory.turns[1].flags == [UNKNOWN_PICTURE]
        assert trajectory.turns[2].flags == ["node id taken"]
        assert not trajectory.turns[2].format_ok
        nodes = trajectory.meta["graph"]["nodes"]
        assert [(node["id"], node["parents"]) for node in nodes[1:]] == [
            ("search_1", ["root"]),
            ("root_2", ["search_1"]),
        ]
        assert nodes[1]["memory"] == {"a#page=1": 3}  # scored 5, then named again without a score
        assert len(nodes[2]["memory"]) == 1

    def test_a_later_summary_can_score_a_kept_picture_again(self):
        trajectory, _ = run(
            SCRIPT[0], summarise("x", (1, 5)), add("s2", "tower"), summarise("y", (1, 1)), answer("9")
        )
        assert trajectory.meta["graph"]["nodes"][1]["memory"] == {"a#page=1": 1}
        assert trajectory.turns[1].action.memorised[0].page_id == "a#page=1"


class TestEndings:
    def test_forced_answer_then_plain_text(self):
        trajectory, client = run(SCRIPT[0], SCRIPT[1], "no call", "The height is 9.", max_calls=2)
        assert [[tool.name for tool in request.tools] for request in client.requests[2:]] == [
            ["add_answer_node"],
            [],
        ]
        assert trajectory.answer == "The height is 9."
        assert trajectory.turns[3].flags == ["answer without tags"]
        assert all(m.role != "tool" for m in client.requests[3].messages)
        forced, _ = run(SCRIPT[0], SCRIPT[1], answer("9"), max_calls=2)
        assert (forced.answer, len(forced.turns)) == ("9", 3)
        assert forced.meta["graph"]["answer"]["answer"] == "9"

    def test_a_forced_answer_in_the_middle_of_a_search(self):
        trajectory, client = run(SCRIPT[0], SCRIPT[1], "x", max_calls=1)
        forced, plain = client.requests[1:]
        assert forced.messages[-2].role == "tool"
        assert plain.messages[-2].role == "user"
        assert len(plain.messages[-2].images) == len(forced.messages[-2].images) > 0
        assert "<tool_call>" in plain.messages[-3].text
        assert trajectory.answer == "x"

    def test_faults(self):
        client = Replies(SCRIPT[0], takes_tools=True)
        trajectory = solve("dag", client, retriever=WordRetriever(error=TimeoutError("slow")))
        assert (trajectory.error.source, trajectory.error.type) == ("environment", "TimeoutError")
        assert isinstance(trajectory.turns[0].action, Search)
        assert trajectory.meta["graph"]["nodes"][0]["id"] == "root"
        down, _ = run(ConnectionError("gone"))
        assert down.error.source == "policy"


def test_the_plain_policy():
    graph = ActionGraph("q")
    plain = PlainGraphPolicy(pressure_onset_tokens=100)
    assert plain.retained(graph, "") == []
    node, _ = graph.add_search("s", ["root"], "blue")
    node.pages = list(CAPTIONS)[:4]
    for page_id in node.pages:
        graph.keep(page_id, 3)
    for text, expected in (("", 150_000), ("x" * 600, 161_250), ("x" * 4000, 172_500)):
        assert [pixels for _, pixels in plain.retained(graph, text)] == [expected] * 4
    tight = PlainGraphPolicy(memory_pixels=8_000)
    assert [entry.page_id for entry, _ in tight.retained(graph, "")] == node.pages[2:]
    assert Store().page("a#page=1").caption
