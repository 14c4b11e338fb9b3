"""The layer inside real episodes: off is the plain agent byte for byte, on acts on what is shown."""

from __future__ import annotations

import random

import pytest

from visor.env.config import EpisodeConfig
from visor.env.episode import Episode
from visor.env.policy import PassThrough
from visor.env.prompts import load_prompts
from visor.retrieval.base import ScoredPage, rank
from visor.taec.config import AdmissionConfig, ExposureConfig, TaecConfig
from visor.taec.policy import TaecPolicy, make_evidence_policy
from visor.taec.text import jaccard, tokens
from visor.types import Completion, ObservationKind, Page, Question

WORDS = ["red", "blue", "green", "tower", "bridge", "gate", "plan", "height", "width", "year"]
OFF = TaecConfig(admission=AdmissionConfig(enabled=False), exposure=ExposureConfig(enabled=False))


class Store:
    def __init__(self, captions):
        self.captions = captions

    def page(self, page_id):
        doc_id, _, number = page_id.partition("#page=")
        fields = {"image": "x.png", "width": 600, "height": 800, "caption": self.captions[page_id]}
        return Page(page_id=page_id, doc_id=doc_id, page_number=int(number), **fields)


class WordRetriever:
    name = "words"

    def __init__(self, captions):
        self.captions = captions

    def search(self, query, k):
        wanted = tokens(query)
        hits = (ScoredPage(page, jaccard(wanted, tokens(text))) for page, text in self.captions.items())
        return rank(hits, k)


def random_captions(chance):
    return {f"d#page={n}": " ".join(chance.choices(WORDS, k=4)) for n in range(1, chance.randint(3, 9))}


def random_reply(chance, question):
    think = chance.choice(
        [
            "short",
            "The red tower clearly shows 5. More below.",
            "Not found on this page.",
            "Perhaps a gate here.",
        ]
    )
    action = chance.choice(
        [
            f"<search>{question}</search>",
            f"<search>{chance.choice(WORDS)}</search>",
            "<bbox>[100,100,500,500]</bbox>",
            "no action",
            "<answer>5</answer>" if chance.random() < 0.2 else f"<search>{question}</search>",
        ]
    )
    return f"<think>{think}</think>{action}"


def play(
    policy_of, captions, replies, question="height of the bridge by year", retriever=WordRetriever, **config
):
    """Run an episode on scripted replies and return its trajectory without its clock readings."""
    question = Question(question_id="q", text=question)
    store = Store(captions)
    episode = Episode(
        question,
        retriever(captions),
        EpisodeConfig(**config),
        load_prompts("visor"),
        store,
        evidence_policy=policy_of(question, store),
    )
    for reply in replies:
        if episode.done:
            break
        episode.context()
        episode.step(Completion(text=reply))
    trajectory = episode.trajectory()
    for turn in trajectory.turns:
        turn.retrieval_seconds = 0.0
    return trajectory


@pytest.mark.parametrize("seed", range(25))
def test_all_operators_off_equals_no_layer_byte_for_byte(seed):
    chance = random.Random(seed)
    captions = random_captions(chance)
    replies = [random_reply(chance, "height of the bridge") for _ in range(10)]
    config = {"window": chance.choice([1, 2, None]), "top_k": chance.choice([2, 10])}
    plain = play(lambda *_: None, captions, replies, **config).model_dump_json()
    for policy_of in (
        lambda question, store: TaecPolicy(OFF, question, store),
        lambda question, store: make_evidence_policy("off", None, question, store),
        lambda *_: PassThrough(),
    ):
        assert play(policy_of, captions, replies, **config).model_dump_json() == plain


def layer(question, store):
    return make_evidence_policy("on", None, question, store)


CAPTIONS = {
    "a#page=1": "bridge height plan",
    "a#page=2": "bridge height plan",
    "b#page=1": "blue bridge year",
}
SEARCH = "<think>{}</think><search>bridge height</search>"
REPLIES = [
    SEARCH.format("Let me look for it"),
    SEARCH.format("A plan. Bridge height not found here."),
    SEARCH.format("A year, it clearly shows 1999. More rows."),
    SEARCH.format("Perhaps a twin of page one."),
    "<think>enough</think><answer>9</answer>",
]


def test_a_query_that_matches_nothing_leaves_searching_open():
    class Empty(WordRetriever):
        def search(self, query, k):
            return [hit for hit in super().search(query, k) if hit.score > 0]

    def empty(think, query):
        return f"<think>{think}</think><search>{query}</search>"

    replies = [
        empty("a plan", "brigde"),
        empty("another word", "bridge"),
        "<think>so</think><answer>9</answer>",
    ]
    for policy_of in (lambda *_: None, layer):
        trajectory = play(policy_of, CAPTIONS, replies, retriever=Empty)
        kinds = [turn.observation.kind for turn in trajectory.turns[:2]]
        assert kinds == [ObservationKind.NO_NEW_PAGE, ObservationKind.PAGE]
    first, second = trajectory.meta["evidence_policy"]["searches"]
    assert (first["pool"], first["unseen"], "admitted" in first) == (0, 0, False)
    assert second["admitted"] == "a#page=1"


def test_a_repeated_query_shows_another_page_than_the_plain_agent_would():
    pages = [play(p, CAPTIONS, REPLIES).shown_page_ids for p in (lambda *_: None, layer)]
    assert pages == [["a#page=1", "a#page=2", "b#page=1"], ["a#page=1", "b#page=1", "a#page=2"]]


def test_evidence_leaves_the_window_condensed_and_the_record_keeps_it_whole():
    trajectory = play(layer, CAPTIONS, REPLIES, window=1)
    evidence = trajectory.turns[4].context[len(trajectory.prompt)].text
    assert "not found" not in evidence
    assert 'search "bridge height": nothing usable here' in evidence
    assert "A year, it clearly shows 1999. More rows." not in evidence
    assert "A year, it clearly shows 1999." in evidence
    assert "Perhaps a twin of page one." in evidence
    assert trajectory.turns[1].think == "A plan. Bridge height not found here."
    # One turn earlier the same thoughts are still near and stand in full.
    assert "it clearly shows 1999. More rows." in trajectory.turns[3].context[len(trajectory.prompt)].text


def test_the_trajectory_records_every_decision():
    trajectory = play(layer, CAPTIONS, REPLIES, window=1)
    record = trajectory.meta["evidence_policy"]
    searched = [turn for turn in trajectory.turns if turn.query is not None]
    assert record["name"] == "taec-AM"
    assert len(record["searches"]) == len(searched) == 4
    for decision, turn in zip(record["searches"], searched):
        shown = turn.observation.page_ids if turn.observation.kind == ObservationKind.PAGE else [None]
        assert [decision.get("admitted")] == shown
        assert decision["query"] == turn.query
    assert [r["repeated"] for r in record["searches"]] == [False, True, True, True]
    assert [(r["page_id"], r["role"]) for r in record["renders"]] == [
        ("a#page=1", "failed"),
        ("b#page=1", "resolved"),
    ]


def test_the_question_is_always_in_full():
    question = "What clearly shows the answer is not found? " * 3
    trajectory = play(layer, CAPTIONS, REPLIES, question=question, window=1)
    assert all(question.strip() in turn.context[1].text for turn in trajectory.turns)
