"""ctx(E_t) ≤ L_t of eq. 1: what is exposed of earlier observations stays within the text budget."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from visor.env.config import EpisodeConfig
from visor.env.episode import Episode
from visor.env.graph import ActionGraph, PlainGraphPolicy, full_node
from visor.env.policy import EpisodeView, EvidenceEntry
from visor.env.prompts import load_prompts
from visor.env.tokens import estimate_tokens
from visor.retrieval.base import ScoredPage
from visor.taec.captions import Captions
from visor.taec.config import TaecConfig
from visor.taec.graph_policy import TaecGraphPolicy
from visor.taec.policy import TaecPolicy
from visor.taec.text_budget import fit
from visor.types import Completion, Page, Question

QUESTION = Question(question_id="q", text="height of the blue bridge")
THOUGHTS = [
    "A plan of the bridge. It clearly shows 9 metres. The rest of the page is about gates and towers.",
    "Height not found on this page, which is about staff.",
    "Perhaps a bridge seen from afar. Its height may stand on another page. 桥的高度不明。",
    "表格明确给出五亿。其余未提。",
    "The answer is 9.",
]

forms = st.lists(
    st.lists(st.integers(0, 60), min_size=1, max_size=3).map(lambda sizes: [*sorted(sizes)[::-1], 0]),
    max_size=8,
)


def slow_fit(sizes, budget):
    """Step after step, each the whole sum anew."""
    levels = [0] * len(sizes)
    steps = [
        (level, index) for level in range(1, 5) for index in range(len(sizes)) if level < len(sizes[index])
    ]
    for level, index in steps:
        if sum(of[chosen] for of, chosen in zip(sizes, levels)) <= budget:
            break
        levels[index] = level
    return levels


@given(forms, st.integers(-20, 300))
def test_the_budget_holds_and_nothing_is_shortened_without_need(sizes, budget):
    levels = fit(sizes, budget)
    assert levels == slow_fit(sizes, budget)
    shown = [of[level] for of, level in zip(sizes, levels)]
    assert sum(shown) <= max(budget, 0)
    if sum(of[0] for of in sizes) <= budget:
        assert levels == [0] * len(sizes)


def test_fit_by_hand():
    sizes = [[30, 10, 0], [5, 0], [40, 20, 0]]
    assert fit(sizes, 75) == [0, 0, 0]
    assert fit(sizes, 74) == [1, 0, 0]  # 55
    assert fit(sizes, 54) == [1, 1, 0]  # a failed branch has one line, which goes: 50
    assert fit(sizes, 30) == [1, 1, 1]
    assert fit(sizes, 29) == [2, 1, 1]  # the oldest goes first
    assert fit(sizes, 0) == [2, 1, 2]
    assert fit([], 0) == []


# ---------------------------------------------------------------- over a VISOR policy


class Store:
    def page(self, page_id):
        fields = {"image": "x.png", "width": 600, "height": 800, "caption": "blue bridge"}
        return Page(page_id=page_id, doc_id="d", page_number=int(page_id.partition("=")[2]), **fields)

    def pages(self):
        return [self.page(f"d#page={n}") for n in range(1, 30)]


class Pages:
    name = "pages"

    def search(self, query, k):
        return [ScoredPage(f"d#page={n}", 1 / n) for n in range(1, k + 1)]


def play(thoughts, *, window, prompts="visor", **exposure):
    """(trajectory, evidence texts of the contexts) of an episode that searches with every turn."""
    layer = TaecPolicy(TaecConfig(exposure=exposure), QUESTION, Store())
    config = EpisodeConfig(window=window, max_turns=len(thoughts) + 1)
    wording = load_prompts(prompts)
    episode = Episode(QUESTION, Pages(), config, wording, Store(), evidence_policy=layer)
    blocks = []
    for thought in thoughts:
        context = episode.context()
        head = wording.evidence_header
        blocks.append(next((m.text for m in context if head and m.text.startswith(head)), ""))
        episode.step(Completion(text=f"<think>{thought}</think><search>bridge</search>"))
    return episode.trajectory(), blocks


@pytest.mark.parametrize("seed", range(20))
def test_the_evidence_block_is_within_the_budget(seed):
    chance = random.Random(seed)
    thoughts = [f"{chance.choice(THOUGHTS)} {n}" for n in range(9)]
    window, budget = chance.choice([1, 2]), chance.choice([0, 30, 90, 200])
    free, unbounded = play(thoughts, window=window, text_budget_tokens=None)
    record, blocks = play(thoughts, window=window, text_budget_tokens=budget)
    # What stays in full whatever the budget: the thoughts of the window's turns and of the newest search.
    kept = [max(window, 1)] * len(blocks)
    for number, (block, before) in enumerate(zip(blocks, unbounded)):
        recent = [thought for thought in thoughts[1:number][-kept[number] :]]
        assert all(thought in block for thought in recent)
        overhead = 24 + 12 * len(recent)  # header and headings
        assert estimate_tokens(block) <= max(budget, estimate_tokens("\n".join(recent)) + overhead)
        if estimate_tokens(before) + 10 <= budget:
            assert block == before
    assert [turn.completion for turn in record.turns] == [turn.completion for turn in free.turns]
    # The last observation holds the evidence block itself.
    assert [turn.observation for turn in record.turns[:-1]] == [turn.observation for turn in free.turns[:-1]]


def test_the_forms_of_entries_as_the_budget_shrinks():
    entries = [
        EvidenceEntry(f"d#page={n}", pre=thought, search_index=n - 1, in_window=False)
        for n, thought in enumerate([THOUGHTS[2], THOUGHTS[1], THOUGHTS[0], THOUGHTS[4]], start=1)
    ]
    view = EpisodeView(QUESTION, [], ["one", "two", "three", "four"], entries)

    def shown(budget):
        layer = TaecPolicy(TaecConfig(exposure={"text_budget_tokens": budget}), QUESTION, Store())
        lines = [layer.render(entry, view) for entry in entries]
        return lines, [record.get("shortened") for record in layer.describe()["renders"]]

    trace = ['search "two": nothing usable here']
    fact, newest = ["It clearly shows 9 metres."], ["The answer is 9."]
    assert shown(None)[0] == [[THOUGHTS[2]], trace, fact, newest]
    assert shown(4000) == shown(None)
    assert shown(40)[0] == [["Perhaps a bridge seen from afar."], trace, fact, newest]
    assert shown(22) == (
        [["Perhaps a bridge seen from afar."], [], fact, newest],
        ["one sentence", "left out", None],
    )
    assert shown(13)[0] == [[], [], fact, newest]
    assert shown(0) == ([[], [], [], newest], ["left out"] * 3)
    assert entries[0].thoughts == [THOUGHTS[2]]


# ---------------------------------------------------------------- over the DAG agent


def graph_layer(**exposure):
    config = TaecConfig(exposure=exposure).for_dag()
    return TaecGraphPolicy(config, QUESTION.text, Captions(Store()), PlainGraphPolicy())


@pytest.mark.parametrize("seed", range(20))
def test_the_graph_is_within_the_budget(seed):
    chance = random.Random(seed)
    graph = ActionGraph(QUESTION.text)
    for number in range(12):
        node, _ = graph.add_search(f"s{number}", [graph.nodes[-1].node_id], f"query {number}")
        node.summary = f"{chance.choice(THOUGHTS)} {number}"
    before = graph.record()
    budget, keep = chance.choice([0, 60, 150, 400]), chance.choice([0, 1, 3])
    policy = graph_layer(text_budget_tokens=budget, keep_newest=keep)
    shown = policy.render(graph)
    text = "[" + ",\n ".join(json.dumps(node, ensure_ascii=False) for node in shown) + "]"
    in_full = [full_node(graph, index) for index in (0, *range(13 - keep, 13))]
    assert [node for node in shown if node in in_full] == in_full
    least = "[" + ",\n ".join(json.dumps(node, ensure_ascii=False) for node in in_full) + "]"
    assert estimate_tokens(text) <= max(budget, estimate_tokens(least) + len(in_full))
    assert graph.record() == before
    left_out = {n.node_id for n in graph.nodes} - {node["id"] for node in shown}
    noted = {r["node"] for r in policy.describe()["renders"] if r.get("shortened") == "left out"}
    assert left_out == noted
    assert len(graph_layer(text_budget_tokens=None).render(graph)) == 13
