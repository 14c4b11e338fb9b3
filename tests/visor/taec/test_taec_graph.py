"""TAEC over the DAG agent: off is the plain agent, each operator acts alone, values against slow ones."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from visor.env.graph import ActionGraph, Hint, PlainGraphPolicy, full_node
from visor.retrieval.base import ScoredPage
from visor.taec.admission import min_max
from visor.taec.captions import Captions
from visor.taec.config import TaecConfig
from visor.taec.graph_policy import TaecGraphPolicy, make_graph_policy
from visor.taec.policy import switched
from visor.taec.requirements import SlotSet
from visor.taec.text import jaccard, occurs, tokens
from visor.types import Page

QUESTION = "height of the blue bridge 总收入"
SLOTS = ["height", "blue", "bridge", "总收入"]
WORDS = ["red", "blue", "green", "tower", "bridge", "gate", "plan", "height", "公司总收入", "2023"]
OFF = {"admission": {"enabled": False}, "exposure": {"enabled": False}, "allocation": {"enabled": False}}
SUMMARIES = [
    "The height is not found here.",
    "Too unclear to read.",
    "It clearly shows 9 metres, but the year was not found.",
    "An overview. The answer is 9 metres. More below.",
    "表格明确给出五亿。其余未提。",
    "Perhaps a bridge.",
    "Height is confirmed as tall.",
]


class Store:
    def __init__(self, captions):
        self.captions = captions

    def page(self, page_id):
        doc_id, _, number = page_id.partition("#page=")
        fields = {"image": "x.png", "width": 10, "height": 10, "caption": self.captions[page_id]}
        return Page(page_id=page_id, doc_id=doc_id, page_number=int(number), **fields)

    def pages(self):
        return list(map(self.page, self.captions))


def captions_of(chance, count=30):
    return {
        f"d#page={n}": " ".join(chance.choices(WORDS, k=chance.randint(0, 6))) for n in range(1, count + 1)
    }


def layer(captions, taec=None, plain=None, slots=None):
    return TaecGraphPolicy(
        TaecConfig(**(taec or {})).for_dag(),
        QUESTION,
        Captions(Store(captions)),
        plain or PlainGraphPolicy(),
        slots,
    )


def switched_layer(switch, captions, **taec):
    return make_graph_policy(
        switched(switch, TaecConfig(**taec)), QUESTION, Captions(Store(captions)), PlainGraphPolicy()
    )


def random_graph(chance, captions, searches):
    graph = ActionGraph(QUESTION)
    free = list(captions)
    for number in range(searches):
        parents = [graph.nodes[chance.randrange(len(graph.nodes))].node_id]
        node, _ = graph.add_search(f"s{number}", parents, " ".join(chance.choices(WORDS, k=2)))
        node.pages = [free.pop() for _ in range(min(chance.randint(0, 3), len(free)))]
        node.summary = chance.choice(SUMMARIES)
        for page_id in node.pages:
            if chance.random() < 0.7:
                graph.keep(page_id, chance.randint(1, 5))
    return graph


def everything(policy, graph, candidates):
    """All that a policy decides for one prompt and one search."""
    return (
        policy.pool_size(5),
        policy.admit("blue bridge", candidates, 5, graph),
        policy.render(graph),
        policy.hints(graph),
        policy.retained(graph, "text " * 3000),
    )


def candidates_of(chance, captions, count=25):
    pages = chance.sample(sorted(captions), min(count, len(captions)))
    return [ScoredPage(page_id, 10.0 - n / 3) for n, page_id in enumerate(pages)]


@pytest.mark.parametrize("seed", range(20))
def test_all_operators_off_is_the_plain_agent(seed):
    chance = random.Random(seed)
    captions = captions_of(chance)
    graph = random_graph(chance, captions, chance.randint(0, 6))
    candidates = candidates_of(chance, captions)
    plain, off = PlainGraphPolicy(), layer(captions, OFF)
    assert everything(off, graph, candidates) == everything(plain, graph, candidates)
    assert (off.name, off.describe()) == (plain.name, plain.describe())
    assert list(off.reported_slots) == list(plain.reported_slots) == []
    assert make_graph_policy(None, QUESTION, Captions(Store(captions)), plain) is plain


@pytest.mark.parametrize("seed", range(15))
def test_each_operator_alone_changes_its_own_part(seed):
    chance = random.Random(seed)
    captions = captions_of(chance)
    graph = random_graph(chance, captions, 5)
    candidates = candidates_of(chance, captions)
    plain = everything(PlainGraphPolicy(), graph, candidates)
    for switch, own in (("A", {0, 1}), ("M", {2, 3}), ("V", {4})):
        decided = everything(switched_layer(switch, captions), graph, candidates)
        assert {n for n in range(5) if decided[n] != plain[n]} <= own
        assert switched_layer(switch, captions).describe()["operators"] == switch


def slow_admit(candidates, captions, k, redundancy):
    """Eq. 2 greedily with the anchor, every term worked out again in each round."""
    pool = {hit.page_id: b for hit, b in zip(candidates, min_max([hit.score for hit in candidates]))}
    rank = list(pool)
    chosen = rank[:1]

    def value(page_id):
        text = captions[page_id]
        new = [s for s in SLOTS if occurs(s, text) and not any(occurs(s, captions[c]) for c in chosen)]
        sims = [jaccard(tokens(text), tokens(captions[c])) for c in chosen]
        penalty = sum(sims) if redundancy == "sum" else max(sims)
        return len(new) / 4 + 0.5 * pool[page_id] - 0.5 * penalty

    while len(chosen) < min(k, len(rank)):
        rest = [page_id for page_id in rank if page_id not in chosen]
        best = max(value(page_id) for page_id in rest)
        chosen.append(next(page_id for page_id in rest if value(page_id) >= best - 1e-12))
    return chosen


@pytest.mark.parametrize(("seed", "redundancy"), list(itertools.product(range(12), ("max", "sum"))))
def test_admission_of_five_equals_the_slow_greedy(seed, redundancy):
    chance = random.Random(seed)
    captions = captions_of(chance)
    candidates = candidates_of(chance, captions)
    policy = layer(captions, {"admission": {"redundancy": redundancy}})
    admitted = policy.admit("q", candidates, 5, ActionGraph(QUESTION))
    assert admitted == slow_admit(candidates, captions, 5, redundancy)
    assert len(admitted) == len(set(admitted)) == 5
    assert admitted[0] == candidates[0].page_id
    [record] = policy.describe()["searches"]
    assert [item["page_id"] for item in record["admitted"]] == admitted
    assert [candidates[item["rank"]].page_id for item in record["admitted"]] == admitted


@pytest.mark.parametrize("seed", range(8))
def test_equal_scores_in_any_order_admit_the_same(seed):
    chance = random.Random(seed)
    captions = captions_of(chance)
    level = [ScoredPage(hit.page_id, 1.0) for hit in candidates_of(chance, captions)]
    graph = ActionGraph(QUESTION)
    expected = layer(captions).admit("q", level, 5, graph)
    assert layer(captions).admit("q", chance.sample(level, len(level)), 5, graph) == expected


def graph_of(*rows):
    """A chain of searches: (query, summary)."""
    graph = ActionGraph(QUESTION)
    for number, (query, summary) in enumerate(rows):
        node, _ = graph.add_search(f"s{number}", [graph.nodes[-1].node_id], query)
        node.pages, node.summary = [f"d#page={number + 1}"], summary
    return graph


class TestExposure:
    ROWS = [
        ("q one", "An overview. The answer is 9 metres. More below."),
        ("q two", "The height is not found here."),
        ("q three", "Perhaps a bridge."),
        ("q four", "It is unclear."),
    ]

    def test_the_forms_by_hand(self):
        graph = graph_of(*self.ROWS)
        policy = layer({f"d#page={n}": "" for n in range(1, 9)})
        assert policy.render(graph) == [
            {"id": "root", "question": QUESTION},
            {"id": "s0", "parents": ["root"], "query": "q one", "summary": "The answer is 9 metres."},
            {"id": "s1", "parents": ["s0"], "trace": 'search "q two": nothing usable here'},
            {"id": "s2", "parents": ["s1"], "query": "q three", "summary": "Perhaps a bridge."},
            {"id": "s3", "parents": ["s2"], "query": "q four", "summary": "It is unclear."},
        ]
        assert [(r["node"], r["role"]) for r in policy.describe()["renders"]] == [
            ("s0", "resolved"),
            ("s1", "failed"),
            ("s2", "active"),
        ]
        policy.render(graph)
        assert len(policy.describe()["renders"]) == 3

    def test_an_older_search_with_a_dead_query_is_a_trace_too(self):
        graph = graph_of(("q", "Perhaps."), ("Q ", "not found"), ("r", "fine"))
        rendered = layer({f"d#page={n}": "" for n in range(1, 9)}).render(graph)
        assert ["trace" in node for node in rendered] == [False, True, True, False]

    def test_how_many_newest_are_in_full(self):
        graph = graph_of(*self.ROWS)
        for keep in (0, 2, 9):
            policy = layer({f"d#page={n}": "" for n in range(1, 9)}, {"exposure": {"keep_newest": keep}})
            full = [full_node(graph, index) for index in range(5)]
            assert policy.render(graph)[5 - keep if keep < 5 else 0 :] == full[5 - keep if keep < 5 else 0 :]
            assert policy.render(graph)[0] == full[0]

    @pytest.mark.parametrize("seed", range(10))
    def test_what_is_stored_never_changes(self, seed):
        chance = random.Random(seed)
        captions = captions_of(chance)
        graph = random_graph(chance, captions, 6)
        before = graph.record()
        policy = layer(captions)
        for _ in range(2):
            everything(policy, graph, candidates_of(chance, captions))
        assert graph.record() == before

    def test_hints(self):
        graph = graph_of(
            ("q one", "The height is not found here."),
            ("q two", "Too unclear to read."),
            ("Q  One", "It clearly shows 9, the year was not found."),
            ("q four", "The answer is 9 metres."),
        )
        policy = layer({f"d#page={n}": "" for n in range(1, 9)})
        assert policy.hints(graph) == [
            Hint("dead_end", "q one", "no result"),
            Hint("dead_end", "q two", "unclear"),
            Hint("early_stop"),
        ]
        partial = graph_of(("q", "It clearly shows 9, the year was not found."))
        assert policy.hints(partial) == [Hint("dead_end", "q", "partial")]

    @pytest.mark.parametrize(
        ("summary", "stops"),
        [
            ("The answer is 9 metres.", True),
            ("表格明确给出五亿。", True),
            ("The answer is the bridge.", False),
            ("It may be 9 metres.", False),
            ("The answer is 9, but the year was not found.", False),
            ("", False),
        ],
    )
    def test_early_stop_needs_confidence_and_a_number(self, summary, stops):
        hints = layer({"d#page=1": ""}).hints(graph_of(("q", summary)))
        assert (Hint("early_stop") in hints) is stops


def slow_energy(graph, index, config):
    """Eq. 5 read literally, for the entry of memory at `index`."""
    entry = graph.memory[index]
    newest = len(graph.nodes) - 1
    children = [n for n, node in enumerate(graph.nodes) if entry.node in node.parents]
    inherited = 0.0
    for child in children:
        held = [slow_energy(graph, i, config) for i, other in enumerate(graph.memory) if other.node == child]
        inherited += sum(held) / len(held) if held else 0.0
    own = entry.priority / 5 * (1 + len(children)) * math.exp(-config.decay.page * (newest - entry.node))
    return own + config.allocation.gamma * inherited


class TestAllocation:
    @pytest.mark.parametrize(("seed", "kappa"), list(itertools.product(range(10), (0.0, 0.5, 1.0))))
    def test_equals_the_formulas(self, seed, kappa):
        """Limits wide enough to bind nowhere."""
        chance = random.Random(seed)
        captions = captions_of(chance)
        graph = random_graph(chance, captions, 5)
        taec = {"allocation": {"kappa": kappa, "min_pixels": 1, "page_max_pixels": 10**7}}
        config = TaecConfig(**taec)
        policy = layer(captions, taec, PlainGraphPolicy(page_max_pixels=10**7))
        text = "x" * 12_000
        got = policy.retained(graph, text)
        energy = [slow_energy(graph, index, config) for index in range(len(graph.memory))]
        ranked = sorted(range(len(energy)), key=lambda i: (-energy[i], -i))[:5]
        chosen = [graph.memory[i] for i in sorted(ranked)]
        assert [entry.page_id for entry, _ in got] == [entry.page_id for entry in chosen]
        if not chosen:
            return
        r = [energy[graph.memory.index(entry)] for entry in chosen]
        longest = max(map(len, captions.values()))
        d = [
            (len(captions[e.page_id]) / longest + sum(occurs(s, captions[e.page_id]) for s in SLOTS) / 4) / 2
            for e in chosen
        ]
        weights = [math.exp(2.0 * a * b) for a, b in zip(r, d)]
        budget = 600_000 * (1 + 0.15 * 0.5)  # 3,000 tokens: half way past the onset of 2,000
        expected = [
            budget * (kappa * a / sum(r) + (1 - kappa) * w / sum(weights)) for a, w in zip(r, weights)
        ]
        assert [pixels for _, pixels in got] == pytest.approx(expected, abs=2)

    @pytest.mark.parametrize("seed", range(15))
    def test_the_budget_is_never_exceeded(self, seed):
        chance = random.Random(seed)
        captions = captions_of(chance)
        graph = random_graph(chance, captions, chance.randint(2, 7))
        allocation = {
            "budget_pixels": chance.choice([4_000, 50_000, 600_000, 2_000_000]),
            "kappa": chance.random(),
            "pressure_factor": chance.choice([-0.5, 0.15]),
        }
        policy = layer(captions, {"allocation": allocation})
        got = policy.retained(graph, "text " * chance.choice([10, 3000, 9000]))
        assert len(got) <= 5
        for record in policy.describe()["allocations"]:
            assert sum(pixels for _, pixels in got) <= record["budget"]
        assert all(3_136 <= pixels <= 300_000 for _, pixels in got)

    def test_one_search_falls_through_to_the_plain_agent(self):
        graph = graph_of(("q", "x"))
        graph.keep("d#page=1", 5)
        policy = layer({f"d#page={n}": "" for n in range(1, 9)})
        assert policy.retained(graph, "") == PlainGraphPolicy().retained(graph, "")
        assert policy.describe()["allocations"] == []


class TestRequirements:
    def test_the_semantic_state_takes_weight_from_settled_slots(self):
        captions = {"d#page=1": "red", "d#page=2": "blue", "d#page=3": "height", "d#page=4": "plan"}
        hits = [ScoredPage(page_id, 1.0) for page_id in captions]
        policy = layer(captions, {"semantic_state": True})
        assert list(policy.reported_slots) == SLOTS
        graph = ActionGraph(QUESTION)
        assert policy.admit("q", hits, 2, graph) == ["d#page=1", "d#page=2"]
        policy.report(["BLUE", "no slot of ours"])
        assert policy.admit("q", hits, 2, graph) == ["d#page=1", "d#page=3"]
        assert policy.describe()["slots"]["settled"] == ["blue"]
        silent = layer(captions)
        assert list(silent.reported_slots) == []

    def test_open_weights_read_the_summaries(self):
        captions = {"d#page=1": "red", "d#page=2": "blue", "d#page=3": "height"}
        hits = [ScoredPage(page_id, 1.0) for page_id in captions]
        policy = layer(captions, {"admission": {"slot_weights": "open"}})
        assert policy.admit("q", hits, 2, graph_of(("x", "It is blue."))) == ["d#page=1", "d#page=3"]

    def test_slots_of_a_model_have_to_be_given(self):
        with pytest.raises(ValueError, match="no slots were given"):
            layer({"d#page=1": ""}, {"slot_extractor": "model"})
        slots = SlotSet(("gate",), "model", 1)
        policy = layer({"d#page=1": ""}, {"slot_extractor": "model"}, slots=slots)
        assert policy.describe()["slots"]["model_calls"] == 1
