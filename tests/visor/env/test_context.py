"""What the policy sees: evidence, window, intent injection, and the seam for evidence policies."""

import pytest
from env_helpers import TINY, VISOR, Ranking, answer, crop, junk, make_episode, play, say, search, texts
from hypothesis import given, settings
from hypothesis import strategies as st

from visor.env import episode as episode_module
from visor.env.policy import PassThrough
from visor.models.smart_resize import smart_resize
from visor.types import Completion, ObservationKind, Search, Trajectory

QUESTION = "How many {evidence} ships, {question}?"
HEADER = VISOR.evidence_header


def evidence_of(episode) -> str:
    """The evidence message of the next call, "" when there is none."""
    messages = episode.context()
    third = messages[2] if len(messages) > 2 else None
    return third.text if third and third.role == "user" else ""


def test_the_first_context_is_system_and_question():
    messages = make_episode(question=QUESTION).context()
    assert [m.role for m in messages] == ["system", "user"]
    assert messages[1].text == f"Question: {QUESTION}"


def test_evidence_is_keyed_by_page_with_pre_and_post():
    episode = make_episode()
    play(episode, [search("before any page"), crop("page one: 3 ships"), search("crop one: 4 ships")])
    assert evidence_of(episode) == (
        "COLLECTED EVIDENCE\nPage d#page=1:\n- page one: 3 ships\n- crop one: 4 ships"
    )
    play(episode, [search("page two: nothing"), search("page three: ports")])
    assert evidence_of(episode).splitlines()[-4:] == [
        "Page d#page=2:",
        "- page two: nothing",
        "Page d#page=3:",
        "- page three: ports",
    ]


@pytest.mark.parametrize(
    ("replies", "recorded"),
    [
        ([search("before any page")], []),
        ([junk(), search("after an invalid one")], []),
        ([search(), search("12345")], []),
        ([search(), search("123456")], ["123456"]),
        ([search(), junk(), search("after an invalid one")], ["I am not sure what to do"]),
        ([search(), Completion(text="<think>cut off while readin")], []),
        ([*[search("a page read")] * 3, search("after nothing new")], ["a page read", "a page read"]),
    ],
)
def test_which_thoughts_are_evidence(replies, recorded):
    episode = play(make_episode(top_k=2), replies)
    lines = [line[2:] for line in evidence_of(episode).splitlines() if line.startswith("- ")]
    assert lines == recorded


def test_a_reply_keeps_its_sampled_ids_in_later_contexts():
    episode = make_episode()
    episode.step(search().model_copy(update={"token_ids": [5, 6, 7]}))
    assert episode.context()[2].token_ids == [5, 6, 7]


def test_the_context_of_a_turn_is_the_one_shown():
    episode = make_episode()
    shown = []
    for reply in [search(), crop("page one: 3 ships"), search("crop: 4 ships"), answer()]:
        shown.append([m.model_copy(deep=True) for m in episode.context()])
        episode.step(reply)
    assert [turn.context for turn in episode.trajectory().turns] == shown


@pytest.mark.parametrize("window", [1, 2, 3])
def test_images_and_visual_tokens_stay_flat_over_ten_turns(window):
    episode = make_episode(window=window)
    tokens = []
    for turn in range(10):
        images = [ref for message in episode.context() for ref in message.images]
        assert len(images) <= window
        sizes = [smart_resize(1008, 2016, min_pixels=r.min_pixels, max_pixels=r.max_pixels) for r in images]
        tokens.append(sum(width * height // 784 for width, height in sizes))
        episode.step(search(f"thought number {turn} about the page"))
    page = 448 * 896 // 784
    assert tokens == [page * min(turn, window) for turn in range(10)]


def test_no_window_keeps_every_turn():
    episode = play(make_episode(window=None, evidence_space=False), [search()] * 8)
    assert [m.role for m in episode.context()] == ["system", "user", *["assistant", "user"] * 8]


def test_every_observation_restates_the_question_and_points_at_the_evidence():
    episode = make_episode(question=QUESTION, top_k=2, max_turns=6)
    play(episode, [search(), crop(), junk(), search(), search()])
    observations = [turn.observation for turn in episode.trajectory().turns]
    assert {o.kind for o in observations} == set(ObservationKind)
    for observation in observations:
        assert QUESTION in observation.message.text
        assert HEADER in observation.message.text


def test_without_intent_injection_observations_name_neither():
    episode = make_episode(question=QUESTION, intent_injection=False, top_k=2, max_turns=6)
    play(episode, [search(), crop("page one: 3 ships"), junk(), search(), search()])
    for turn in episode.trajectory().turns[:-1]:
        assert "ships" not in turn.observation.message.text
        assert HEADER not in turn.observation.message.text
    last = episode.trajectory().turns[-1].observation.message.text
    assert QUESTION not in last
    assert last.endswith(evidence_of(episode))


def test_without_evidence_space_nothing_of_it_is_left():
    episode = make_episode(evidence_space=False, window=None, max_turns=5)
    play(episode, [search(), crop("page one: 3 ships"), search("crop: 4 ships")])
    everything = texts(m for m in episode.context()[2:] if m.role == "user")
    for absent in (HEADER, "page one: 3 ships", VISOR.crop_evaluation, VISOR.crop_correction):
        assert absent not in everything
    assert "How many ships" in everything


def test_the_crop_rules_come_with_pages_and_crops():
    episode = play(make_episode(), [search(), crop(), search("so it is 4 . verify it")])
    page, cropped, verification = (t.observation.message.text for t in episode.trajectory().turns)
    assert VISOR.crop_evaluation in page
    assert VISOR.crop_correction in cropped
    assert VISOR.verification_hint in verification
    assert VISOR.verification_hint not in page


def test_a_page_picture_comes_before_its_text():
    observation = make_episode().step(search())
    assert [part.type for part in observation.message.content] == ["image", "text"]


def test_the_box_rule_follows_the_space():
    assert "thousandths" in make_episode().context()[0].text
    assert "pixels of the page image" in make_episode(box_space="pixels").context()[0].text


def test_the_tiny_wording_word_for_word():
    episode = make_episode(question="how many ships ?", prompts=TINY, max_turns=4, top_k=2)
    assert texts(episode.context()) == "agent\nquestion : how many ships ?"
    play(episode, [search(), search("it is 3 now . verify it"), search("it is four")])
    said = [turn.observation.message.text for turn in episode.trajectory().turns]
    evidence = "evidence : - it is 3 now . verify it - it is four"
    assert said == [
        "page for how many ships ?",
        "page for how many ships ? confirm ?",
        f"no new page . how many ships ? last turn . how many ships ? {evidence}",
    ]
    assert evidence_of(episode) == evidence
    assert make_episode(question="q", prompts=TINY).step(junk()).message.text == "invalid . q"
    no_match = make_episode(Ranking([]), question="q", prompts=TINY).step(search())
    assert no_match.message.text == "no page found . q"


# ---------------------------------------------------------------- random episodes

think = st.sampled_from(["no", "page shows 3 ships", "the answer is 3 . verify it", "cannot confirm it"])
reply = st.one_of(
    st.builds(say, think, st.just("search"), st.sampled_from(["ships", "ports", " "])),
    st.builds(
        say, think, st.just("bbox"), st.sampled_from(["[0,0,500,500]", "[9,9,9,9]", "[-5,2,70,2000]", "x"])
    ),
    st.just(junk()),
    st.just(Completion(text="<think>cut")),
    st.builds(say, think, st.just("answer"), st.sampled_from(["3", ""])),
)
scripts = st.lists(reply, min_size=1, max_size=8)
configs = st.fixed_dictionaries(
    {
        "window": st.sampled_from([None, 1, 2, 3]),
        "max_turns": st.integers(1, 7),
        "top_k": st.integers(1, 4),
        "intent_injection": st.booleans(),
        "evidence_space": st.booleans(),
    }
)
modest = settings(derandomize=True, max_examples=150, deadline=None)


def run(script, config, policy=None):
    return play(make_episode(policy=policy, **config), script)


@modest
@given(scripts, configs)
def test_pass_through_equals_no_policy_byte_for_byte(script, config):
    clock = episode_module.time.perf_counter
    episode_module.time.perf_counter = lambda: 0.0
    try:
        plain = run(script, config).trajectory()
        layered = run(script, config, PassThrough()).trajectory()
    finally:
        episode_module.time.perf_counter = clock
    assert plain.model_dump_json() == layered.model_dump_json()


def slow_context(trajectory: Trajectory, n: int, config: dict) -> list:
    """The context before call `n`, worked out from the record alone."""
    thoughts: dict[str, list[str]] = {}
    for before, turn in zip(trajectory.turns[:n], trajectory.turns[1 : n + 1]):
        text, shown = turn.completion.text, before.observation
        if turn.index < n and shown.page_ids and "</think>" in text and len(turn.think) > 5:
            thoughts.setdefault(shown.page_ids[0], []).append(turn.think)
    block = [HEADER]
    for page_id, lines in thoughts.items():
        block += [f"Page {page_id}:", *(f"- {line}" for line in lines)]
    wanted = [m.text for m in trajectory.prompt]
    if thoughts and config["evidence_space"]:
        wanted.append("\n".join(block))
    kept = trajectory.turns[:n] if config["window"] is None else trajectory.turns[:n][-config["window"] :]
    for turn in kept:
        wanted += [turn.completion.text, turn.observation.message.text]
    return wanted


@modest
@given(scripts, configs)
def test_random_episodes_keep_the_rules(script, config):
    trajectory = run(script, config).trajectory()
    assert 1 <= len(trajectory.turns) <= config["max_turns"]
    shown: list[str] = []
    for turn in trajectory.turns:
        assert [m.text for m in turn.context] == slow_context(trajectory, turn.index, config)
        images = [ref for message in turn.context for ref in message.images]
        assert len(images) <= (config["window"] or config["max_turns"])
        if turn.observation is None:
            continue
        assert turn.observation.forced_answer == (turn.index == config["max_turns"] - 2)
        if isinstance(turn.action, Search):
            unseen = [page for page, _ in turn.candidates if page not in shown]
            assert turn.observation.page_ids == unseen[:1]
            shown += unseen[:1]
        assert (turn.observation.kind == ObservationKind.INVALID) == (turn.action.kind == "invalid")
    assert trajectory.shown_page_ids == shown


class Layer(PassThrough):
    """Shows the last unseen candidate, and each entry as one line with what it was told."""

    name = "layer"

    def __init__(self):
        self.seen = []

    def pool_size(self, top_k):
        return 2 * top_k

    def select(self, query, candidates, view):
        self.seen.append((query, list(view.queries), list(view.shown_page_ids)))
        unseen = [hit.page_id for hit in candidates if hit.page_id not in view.shown_page_ids]
        return unseen[-1] if unseen else None

    def render(self, entry, view):
        return [f"{entry.search_index} {entry.in_window} {entry.pre}"]

    def describe(self):
        return {"selections": len(self.seen)}


def test_an_evidence_policy_chooses_and_renders():
    layer = Layer()
    episode = make_episode(policy=layer, top_k=2, window=1)
    play(episode, [search(query="a"), search("first page", query="b"), search("second page", query="c")])
    assert episode.trajectory().shown_page_ids == ["d#page=4", "d#page=3", "d#page=2"]
    assert layer.seen[2] == ("c", ["a", "b"], ["d#page=4", "d#page=3"])
    assert "- 0 False first page" in evidence_of(episode)
    assert "- 1 True second page" in evidence_of(episode)
    assert episode.trajectory().meta["evidence_policy"] == {"name": "layer", "selections": 3}


def test_a_policy_that_shows_a_page_twice_is_a_fault():
    class Repeats(PassThrough):
        def select(self, query, candidates, view):
            return candidates[0].page_id

    episode = make_episode(policy=Repeats())
    episode.step(search())
    with pytest.raises(episode_module.EnvironmentFault, match="not a candidate"):
        episode.step(search())
