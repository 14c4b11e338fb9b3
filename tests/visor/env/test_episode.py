import json

import pytest
from env_helpers import (
    PAGE,
    TINY,
    VISOR,
    Broken,
    Ranking,
    answer,
    case_file,
    crop,
    junk,
    make_episode,
    pages,
    play,
    search,
    texts,
)

from visor.env.episode import EnvironmentFault, Episode
from visor.env.policy import PassThrough
from visor.retrieval.base import ScoredPage
from visor.types import Completion, FinishReason, Invalid, ObservationKind, StopReason

KIND = ObservationKind


def kinds(episode: Episode) -> list[str]:
    return [t.observation.kind.value if t.observation else "-" for t in episode.trajectory().turns]


def reasons(episode: Episode) -> list[str]:
    return [t.action.reason for t in episode.trajectory().turns if isinstance(t.action, Invalid)]


def test_search_crop_verify_answer():
    replies = [search(), crop(), search("so it is 12 . verify it"), answer("12 ships")]
    trajectory = play(make_episode(), replies).trajectory()
    assert [turn.action.kind for turn in trajectory.turns] == ["search", "crop", "search", "answer"]
    assert (trajectory.answer, trajectory.stop_reason) == ("12 ships", StopReason.ANSWER)
    assert trajectory.shown_page_ids == ["d#page=1", "d#page=2"]
    assert [turn.is_verification for turn in trajectory.turns] == [False, False, True, False]
    first, cropped, second = (turn.observation for turn in trajectory.turns[:3])
    # [100,100,500,500] of 1000 on a 1008x2016 page: (101, 202, 504, 1008), then 28 pixels a side.
    assert cropped.crop == (73, 174, 532, 1036)
    assert (cropped.page_ids, cropped.message.images[0].box) == (["d#page=1"], cropped.crop)
    assert not first.verification_hint
    assert second.verification_hint
    assert trajectory.turns[0].candidates[0] == ("d#page=1", 1.0)
    assert len(trajectory.turns[0].candidates) == 10


def test_the_record_survives_a_round_trip():
    trajectory = play(make_episode(), [search(), crop(), answer()]).trajectory()
    assert type(trajectory).model_validate_json(trajectory.model_dump_json()) == trajectory


def test_each_page_of_a_repeated_query_is_new():
    episode = play(make_episode(top_k=4), [search()] * 4)
    assert episode.trajectory().shown_page_ids == pages(4)


def test_nothing_new_takes_only_an_answer():
    episode = play(
        make_episode(Ranking(pages(1))), [search(), search(), search(query="other"), crop(), answer()]
    )
    assert kinds(episode) == ["page", "no_new_page", "invalid", "invalid", "-"]
    assert all("only an answer" in reason for reason in reasons(episode))
    assert episode.trajectory().stop_reason == StopReason.ANSWER


class Spelling:
    """Finds nothing for the query "shpis", two pages for any other."""

    name = "spelling"

    def search(self, query: str, k: int) -> list[ScoredPage]:
        return [] if query == "shpis" else Ranking(pages(2)).search(query, k)


@pytest.mark.parametrize("policy", [None, PassThrough()])
def test_a_query_that_matches_nothing_leaves_searching_open(policy):
    episode = make_episode(Spelling(), policy=policy)
    play(episode, [search(), search(query="shpis"), search("the page is gone"), search(query="shpis")])
    assert kinds(episode) == ["page", "no_new_page", "page", "no_new_page"]
    found, nothing, *_ = (turn.observation.message.text for turn in episode.trajectory().turns)
    assert nothing.startswith(VISOR.no_match.text)
    assert "How many ships are there?" in nothing
    assert VISOR.no_match.text not in found
    assert [entry.page_id for entry in episode._evidence.entries] == ["d#page=1", "d#page=2"]
    # The two pages of the other query have been shown: from here on only an answer is possible.
    episode.step(search())
    assert episode.trajectory().turns[-1].observation.message.text.startswith(VISOR.no_new_page.text)
    play(episode, [search(query="shpis")])
    assert kinds(episode)[4:] == ["no_new_page", "invalid"]


def test_a_page_in_view_can_be_enlarged_after_a_query_that_matches_nothing():
    assert kinds(play(make_episode(Spelling()), [search(), search(query="shpis"), crop()]))[-1] == "crop"


def test_case_seen_pages_never_come_from_another_episode():
    case = json.loads(case_file("seen_pages.json").read_text(encoding="utf-8"))
    as_id = {name: f"{name[0]}#page={name[-1]}" for name in ("a_1", "a_2", "b_1")}
    shown = {}
    episodes = {
        name: make_episode(Ranking([as_id[p] for p in case[name]["search_returns"]])) for name in ("A", "B")
    }
    play(episodes["A"], [search()] * len(case["A"]["seen"]))
    for name in case["order_in_batch"]:
        shown[name] = episodes[name].step(search())
    assert shown["A"].kind == KIND.NO_NEW_PAGE
    assert shown["B"].page_ids == [as_id["b_1"]]


@pytest.mark.parametrize(
    ("replies", "config", "reason"),
    [
        ([crop()], {}, "no page has been shown"),
        ([search(), crop(), crop()], {}, "enlarged part cannot be enlarged again"),
        ([search(), crop(), junk(), crop()], {}, "enlarged already"),
        ([search(), junk(), junk(), crop()], {"window": 2}, "no longer in view"),
        ([search(), junk(), crop()], {"window": 1}, "no longer in view"),
        ([search(), crop(box="[0,0,0,0]")], {}, "thinner than one unit"),
        ([search(), crop(box="[1200,0,1300,10]")], {}, "outside the page"),
        ([search(), crop(box="[NaN,0,1,1]")], {}, "not of the form"),
        ([search(), crop(box="[10,10,20,20]")], {"crop_margin": 0}, "under 28 pixels a side"),
    ],
)
def test_crops_that_are_refused(replies, config, reason):
    episode = play(make_episode(**config), replies)
    last = episode.trajectory().turns[-1]
    assert last.observation.kind == KIND.INVALID
    assert reason in last.action.reason
    assert last.action.reason in last.observation.message.text
    assert last.action.raw == last.completion.text


@pytest.mark.parametrize(
    ("replies", "config"),
    [
        ([search(), junk(), crop()], {"window": 2}),
        ([search(), junk(), junk(), junk(), crop()], {"window": None}),
        ([search(), crop(box="[0,0,0,0]"), crop()], {}),
        ([search(), crop(), search(), crop()], {}),
    ],
)
def test_crops_that_are_possible(replies, config):
    assert kinds(play(make_episode(**config), replies))[-1] == "crop"


def test_a_pixel_box_uses_the_size_the_client_reports_else_the_smart_resize():
    def region(sizes):
        episode = make_episode(box_space="pixels", crop_margin=0)
        episode.step(search())
        reply = crop(box="[100,100,200,200]").model_copy(update={"image_sizes": sizes})
        return episode.step(reply).crop

    assert region([(504, 1008)]) == (200, 200, 400, 400)
    # 1008x2016 into at most 512 tokens: scale sqrt(1008·2016 / 401408) = 2.25 -> 448x896 -> 2.25 back.
    assert region(None) == (225, 225, 450, 450)


def test_the_call_limit_forces_an_answer():
    episode = make_episode(max_turns=4)
    play(episode, [search(), search("the page shows 12 ships"), search("a list of ports")])
    last = episode.trajectory().turns[-1].observation
    assert last.forced_answer
    assert last.page_ids == ["d#page=3"]
    assert "the page shows 12 ships" in last.message.text
    assert "a list of ports" in last.message.text
    assert not any(turn.observation.forced_answer for turn in episode.trajectory().turns[:-1])
    assert episode.step(search()) is None
    trajectory = episode.trajectory()
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.MAX_TURNS, None)
    assert isinstance(trajectory.turns[-1].action, Invalid)
    assert len(trajectory.turns) == 4


def test_the_reply_to_the_forced_answer_may_answer():
    episode = play(make_episode(max_turns=2), [junk(), answer("7")])
    assert kinds(episode) == ["invalid", "-"]
    assert episode.trajectory().turns[0].observation.forced_answer
    assert (episode.trajectory().answer, episode.trajectory().stop_reason) == ("7", StopReason.ANSWER)


def test_a_single_call_is_final():
    assert play(make_episode(max_turns=1), [search()]).trajectory().stop_reason == StopReason.MAX_TURNS


def test_a_reply_cut_by_the_token_limit_is_no_answer():
    reply = Completion(text="<think>a</think><answer>12 shi", finish_reason=FinishReason.LENGTH)
    episode = play(make_episode(), [reply])
    assert kinds(episode) == ["invalid"]
    assert episode.trajectory().answer is None


def test_an_empty_answer_is_an_answer():
    trajectory = play(make_episode(), [answer("  ")]).trajectory()
    assert (trajectory.answer, trajectory.stop_reason) == ("", StopReason.ANSWER)


def test_a_retrieval_failure_is_recorded_and_raised():
    episode = make_episode(Broken())
    with pytest.raises(EnvironmentFault, match="ConnectionError: the index is gone"):
        episode.step(search())
    episode.fail("environment", RuntimeError("a later one"))
    trajectory = episode.trajectory()
    assert episode.done
    assert trajectory.stop_reason == StopReason.ERROR
    assert (trajectory.error.source, trajectory.error.type) == ("environment", "ConnectionError")
    assert trajectory.turns[0].query == "ships"
    assert trajectory.turns[0].observation is None


def test_a_page_that_the_store_does_not_know_is_an_environment_fault():
    episode = make_episode()
    episode._page_size = {}.__getitem__
    episode.step(search())
    with pytest.raises(EnvironmentFault, match="KeyError"):
        episode.step(crop())


def test_an_episode_is_used_once():
    episode = play(make_episode(), [answer()])
    for call in (episode.context, lambda: episode.step(answer()), lambda: episode.stop(StopReason.LENGTH)):
        with pytest.raises(RuntimeError, match="over"):
            call()


def test_stopping_from_outside():
    episode = play(make_episode(), [search()])
    episode.stop(StopReason.LENGTH)
    trajectory = episode.trajectory()
    assert (trajectory.stop_reason, trajectory.answer, trajectory.error) == (StopReason.LENGTH, None, None)


def test_meta_records_the_settings():
    meta = make_episode(window=3, prompts=TINY).trajectory().meta
    assert meta["episode"]["window"] == 3
    assert meta["episode"]["page_max_pixels"] == 512 * 784
    assert meta["prompts"]["name"] == "tiny"
    assert meta["evidence_policy"] == {"name": "none"}


def test_a_store_gives_page_sizes():
    class Store:
        def page(self, page_id):
            return type("Page", (), {"width": PAGE[0], "height": PAGE[1]})

    episode = Episode(
        make_episode()._question, Ranking(pages(3)), make_episode()._config, TINY, Store(), seed=5
    )
    assert play(episode, [search(), crop()]).trajectory().turns[1].observation.crop == (73, 174, 532, 1036)
    assert episode.trajectory().seed == 5


def test_only_the_policys_own_text_is_parsed():
    """The example answer in the environment's hint is never scored (case D2)."""
    case = json.loads(case_file("hint_leak.json").read_text(encoding="utf-8"))
    episode = make_episode(question=case["question"], max_turns=2)
    for part in case["transcript"]:
        if part["by"] == "model":
            episode.step(Completion(text=part["text"], finish_reason=FinishReason.LENGTH))
    trajectory = episode.trajectory()
    assert trajectory.answer is case["right"]["answer"]
    assert [turn.format_ok for turn in trajectory.turns] == [False, False]
    assert "Beijing" not in texts(trajectory.turns[-1].context).replace(case["question"], "")
