"""Vanilla and ReAct: what is shown, what is recorded, and how a question ends."""

from __future__ import annotations

import asyncio
import json

import pytest
from systems_support import CAPTIONS, QUESTION, Replies, Store, WordRetriever, make, native, solve

from visor.models.base import ContextTooLong, ToolsNotSupported, TooManyImages
from visor.systems.config import LoopConfig
from visor.systems.registry import SYSTEMS, build_system, check_layer, check_system
from visor.types import (
    Completion,
    FinishReason,
    Invalid,
    ObservationKind,
    Question,
    Search,
    StopReason,
    ToolCall,
    derive_seed,
)

SEARCH = "<think>look</think><search>{}</search>"
ANSWER = "<think>page 2 has it</think><answer>9</answer>"


class TestVanilla:
    def test_one_retrieval_and_one_call(self):
        client = Replies(ANSWER)
        trajectory = solve("vanilla", client, seed=3, sample_index=1)
        assert (trajectory.system, trajectory.answer) == ("vanilla", "9")
        assert trajectory.stop_reason == StopReason.ANSWER
        searched, asked = trajectory.turns
        assert searched.by_system
        assert not asked.by_system
        assert searched.query == QUESTION.text
        assert searched.observation.page_ids == trajectory.shown_page_ids
        assert len(trajectory.shown_page_ids) == 5
        [request] = client.requests
        assert request.messages == asked.context == [*trajectory.prompt, searched.observation.message]
        assert request.seed == derive_seed(3, "q1", 1, 0)
        assert request.sampling.temperature == 0.3
        assert {ref.max_pixels for ref in request.messages[-1].images} == {300_000}
        assert not any(caption in request.messages[-1].text for caption in CAPTIONS.values())

    @pytest.mark.parametrize(
        ("reply", "answer", "flags"),
        [
            ("<answer>9</answer>", "9", []),
            ("The height is 9 metres.", "The height is 9 metres.", ["answer without tags"]),
            ("<think>it is 9</think>", None, ["no action"]),
            ("<think><answer>8</answer> is wrong", None, ["cut off", "no action"]),
            (Completion(text="The height is", finish_reason=FinishReason.LENGTH), None, ["no action"]),
            ("", None, ["no action"]),
        ],
    )
    def test_what_counts_as_an_answer(self, reply, answer, flags):
        trajectory = solve("vanilla", Replies(reply))
        assert (trajectory.answer, trajectory.turns[1].flags) == (answer, flags)
        assert trajectory.stop_reason == (StopReason.ANSWER if answer else StopReason.MAX_TURNS)

    def test_a_question_that_matches_nothing_is_still_asked(self):
        trajectory = solve("vanilla", Replies(ANSWER), Question(question_id="q", text="zebra"))
        assert trajectory.turns[0].observation.kind == ObservationKind.NO_NEW_PAGE
        assert trajectory.shown_page_ids == []
        assert trajectory.answer == "9"

    def test_faults_and_limits_are_records(self):
        lost = solve("vanilla", Replies(ANSWER), retriever=WordRetriever(error=OSError("index lost")))
        assert (lost.error.source, lost.error.type) == ("environment", "OSError")
        assert len(lost.turns) == 1
        down = solve("vanilla", Replies(ConnectionError("gone")))
        assert (down.error.source, down.stop_reason) == ("policy", StopReason.ERROR)
        long = solve("vanilla", Replies(ContextTooLong("x")))
        assert (long.stop_reason, long.error) == (StopReason.LENGTH, None)


class TestReactInTags:
    def test_every_observation_stays_in_the_history(self):
        client = Replies(SEARCH.format("blue bridge"), SEARCH.format("gate height"), ANSWER)
        trajectory = solve("react", client, pages_per_search=2)
        assert trajectory.answer == "9"
        assert [sum(len(m.images) for m in turn.context) for turn in trajectory.turns] == [0, 2, 4]
        first, second, _ = trajectory.turns
        history = [message for turn in (first, second) for message in (turn.observation.message,)]
        assert [m for m in trajectory.turns[2].context if m.images] == history
        replies = [m.text for m in trajectory.turns[2].context if m.role == "assistant"]
        assert replies == [turn.completion.text for turn in (first, second)]
        assert "blue bridge overview" in first.observation.message.text
        assert trajectory.meta["protocol"] == {"name": "text", "reason": "the client takes no tools"}
        assert not client.requests[0].tools

    def test_a_page_is_shown_again_when_another_query_finds_it(self):
        client = Replies(SEARCH.format("blue bridge"), SEARCH.format("bridge blue tower"), ANSWER)
        trajectory = solve("react", client)
        first, second = (turn.observation.page_ids for turn in trajectory.turns[:2])
        assert set(first) & set(second)

    def test_a_repeated_query_gets_a_notice(self):
        retriever = WordRetriever()
        client = Replies(SEARCH.format("blue bridge"), SEARCH.format(" BLUE   bridge"), ANSWER)
        trajectory = solve("react", client, retriever=retriever)
        repeated = trajectory.turns[1]
        assert isinstance(repeated.action, Search)
        assert repeated.observation.kind == ObservationKind.NO_NEW_PAGE
        assert "sent this query before" in repeated.observation.message.text
        assert retriever.asked == [("blue bridge", 5)]

    @pytest.mark.parametrize(("budget", "expected"), [(0, 300_000), (400_000, 100_000), (4_000_000, 300_000)])
    def test_the_visual_budget_is_split_over_all_pictures_at_each_call(self, budget, expected):
        client = Replies(SEARCH.format("blue bridge"), SEARCH.format("gate height"), ANSWER)
        trajectory = solve("react", client, pages_per_search=2, visual_budget=budget)
        pictures = [ref for message in trajectory.turns[2].context for ref in message.images]
        assert [ref.max_pixels for ref in pictures] == [expected] * 4
        if budget:
            assert sum(ref.max_pixels for ref in pictures) <= budget
        assert {ref.max_pixels for ref in trajectory.turns[0].observation.message.images} == {300_000}

    def test_captions_can_be_left_out(self):
        client = Replies(SEARCH.format("blue bridge"), ANSWER)
        trajectory = solve("react", client, captions=False)
        assert "overview" not in trajectory.turns[0].observation.message.text

    def test_a_crop_or_no_action_is_invalid_and_costs_a_call(self):
        client = Replies("<think>x</think><bbox>[1,2,300,400]</bbox>", "hm", ANSWER)
        trajectory = solve("react", client)
        assert [type(turn.action) for turn in trajectory.turns[:2]] == [Invalid, Invalid]
        assert trajectory.turns[1].observation.kind == ObservationKind.INVALID
        assert trajectory.answer == "9"

    def test_after_the_last_call_an_answer_is_forced_then_asked_in_plain_text(self):
        searches = [SEARCH.format(word) for word in ("blue", "red")]
        forced = solve("react", Replies(*searches, ANSWER), max_calls=2)
        assert (forced.answer, len(forced.turns)) == ("9", 3)
        assert "cannot search any more" in forced.turns[2].context[-1].text
        client = Replies(*searches, SEARCH.format("green"), "It is 9.")
        plain = solve("react", client, max_calls=2)
        assert (plain.answer, len(plain.turns)) == ("It is 9.", 4)
        assert isinstance(plain.turns[2].action, Invalid)
        assert "plain text" in plain.turns[3].context[-1].text
        unanswered = solve("react", Replies(*searches, "<think>", "<think>"), max_calls=2)
        assert (unanswered.answer, unanswered.stop_reason) == (None, StopReason.MAX_TURNS)

    def test_too_many_pictures_end_the_question_without_a_fault(self):
        trajectory = solve("react", Replies(SEARCH.format("blue"), TooManyImages("x")))
        assert (trajectory.stop_reason, trajectory.error) == (StopReason.IMAGE_LIMIT, None)
        assert len(trajectory.turns) == 1

    def test_a_broken_store_keeps_the_turn(self):
        class Broken(Store):
            def page(self, page_id):
                raise KeyError(page_id)

        trajectory = solve("react", Replies(SEARCH.format("blue")), store=Broken())
        assert trajectory.error.source == "environment"
        assert trajectory.turns[0].query == "blue"


def with_arguments(arguments):
    return Completion(text="", tool_calls=[ToolCall(call_id="c", name="search", arguments=arguments)])


class TestReactNative:
    def test_calls_and_results_carry_their_ids(self):
        client = Replies(
            native("search", "I look for it.", "c7", query="blue bridge"),
            native("answer", response=" 9 "),
            takes_tools=True,
        )
        trajectory = solve("react", client)
        assert trajectory.answer == "9"
        assert trajectory.meta["protocol"] == {"name": "native"}
        assert [tool.name for tool in client.requests[0].tools] == ["search", "answer"]
        reply, result = trajectory.turns[1].context[2:]
        assert (reply.role, reply.content[1].call_id) == ("assistant", "c7")
        assert (result.role, result.content[0].call_id) == ("tool", "c7")
        assert trajectory.turns[0].think == "I look for it."

    def test_only_the_first_of_several_calls_runs_and_each_gets_a_result(self):
        calls = [
            ToolCall(call_id=f"c{n}", name="search", arguments=json.dumps({"query": word}))
            for n, word in enumerate(("blue", "red"))
        ]
        retriever = WordRetriever()
        client = Replies(
            Completion(text="", tool_calls=calls), native("answer", response="9"), takes_tools=True
        )
        trajectory = solve("react", client, retriever=retriever)
        assert [query for query, _ in retriever.asked] == ["blue"]
        assert trajectory.turns[0].flags == ["more than one call"]
        results = [
            part for part in trajectory.turns[0].observation.message.content if part.type == "tool_result"
        ]
        assert [part.call_id for part in results] == ["c0", "c1"]

    @pytest.mark.parametrize(
        ("reply", "reason"),
        [
            ("I think it is 9.", "it called no tool"),
            (
                Completion(
                    text="", tool_calls=[ToolCall(call_id="c", name="search", arguments='{"query": ')]
                ),
                "not a JSON object",
            ),
            (
                with_arguments("[1]"),
                "not a JSON object",
            ),
            (native("open_page", page=3), "there is no tool 'open_page'"),
            (native("search", query="  "), "the search query is empty"),
            (native("answer", text="9"), "the answer is missing"),
        ],
    )
    def test_a_reply_without_a_usable_call_is_told_why(self, reply, reason):
        client = Replies(reply, native("answer", response="9"), takes_tools=True)
        trajectory = solve("react", client)
        assert reason in trajectory.turns[0].action.reason
        assert reason in trajectory.turns[0].observation.message.text
        assert trajectory.answer == "9"

    def test_a_call_written_as_text_is_read_and_flagged(self):
        written = 'So: <tool_call>{"name": "answer", "arguments": {"response": 9}}</tool_call>'
        trajectory = solve("react", Replies(written, takes_tools=True))
        assert (trajectory.answer, trajectory.turns[0].flags) == ("9", ["call written as text"])
        assert trajectory.turns[0].think == "So:"

    def test_an_endpoint_that_refuses_tools_is_asked_in_text_from_then_on(self):
        client = Replies(
            ToolsNotSupported("no tool parser"), SEARCH.format("blue"), ANSWER, ANSWER, takes_tools=True
        )
        system = make("react", client)
        for calls in (2, 1):
            trajectory = asyncio.run(system.solve(QUESTION))
            assert (trajectory.answer, len(trajectory.turns)) == ("9", calls)
            assert trajectory.meta["protocol"]["name"] == "text"
            assert "no tool parser" in trajectory.meta["protocol"]["reason"]
        assert [bool(request.tools) for request in client.requests] == [True, False, False, False]

    def test_the_forced_answer_offers_the_answer_alone_and_the_plain_question_nothing(self):
        client = Replies(native("search", query="blue"), "no call", "It is 9.", takes_tools=True)
        trajectory = solve("react", client, max_calls=1)
        assert [[tool.name for tool in r.tools] for r in client.requests] == [
            ["search", "answer"],
            ["answer"],
            [],
        ]
        assert trajectory.answer == "It is 9."
        assert all(m.role != "tool" for m in trajectory.turns[2].context)
        assert any(m.images for m in trajectory.turns[2].context)

    def test_native_calls_can_be_refused_or_demanded_by_setting(self):
        assert solve("react", Replies(ANSWER, takes_tools=True), protocol="text").answer == "9"
        with pytest.raises(ValueError, match="makes no native tool calls"):
            make("react", Replies(), protocol="native")
        stuck = solve("react", Replies(ToolsNotSupported("no parser"), takes_tools=True), protocol="native")
        assert stuck.error.type == "ToolsNotSupported"


class TestRegistry:
    def test_unknown_names_are_refused_with_the_known_ones(self):
        with pytest.raises(ValueError, match=r"known: .*react, vanilla, visor"):
            check_system("rag")
        with pytest.raises(ValueError, match="not over vanilla"):
            check_layer("vanilla")
        check_layer("visor")

    @pytest.mark.parametrize("name", sorted(set(SYSTEMS) - {"visor"}))
    def test_the_settings_and_the_wording_are_on_the_record(self, name):
        trajectory = solve(name, Replies(ConnectionError("x")), max_calls=3)
        assert trajectory.system == name
        assert trajectory.meta["settings"] == LoopConfig(max_calls=3).model_dump(mode="json")
        assert trajectory.meta["prompts"]["name"] == name
        assert len(trajectory.meta["prompts"]["sha256"]) == 64

    def test_prompts_of_ones_own(self, tmp_path):
        path = tmp_path / "own.yaml"
        path.write_text(
            "name: own\nsystem: be brief\nquestion: 'Q {question}'\npage: ''\npages_end: ''\nno_page: ''\n"
        )
        trajectory = solve("vanilla", Replies(ANSWER), prompts=str(path))
        assert trajectory.prompt[0].text == "be brief"
        assert trajectory.meta["prompts"]["name"] == "own"
        path.write_text(path.read_text().replace("{question}", "{query}"))
        with pytest.raises(ValueError, match=r"(?s)own\.yaml.*unknown placeholder \{query\}"):
            make("vanilla", Replies(), prompts=str(path))
        with pytest.raises(ValueError, match="one of tiny"):
            make("vanilla", Replies(), prompts="missing.yaml")
        assert solve("react", Replies(ANSWER), prompts="tiny").prompt[0].text == "agent"

    def test_build_system_refuses_an_unknown_name(self):
        with pytest.raises(ValueError, match="unknown system"):
            build_system("x", None)
