"""Admission against eq. 2 computed the slow way, and by hand."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from visor.taec.admission import Candidate, Coefficients, admit, gain, min_max
from visor.taec.requirements import RequirementState
from visor.taec.text import jaccard, tokens

WORDS = ["red", "blue", "green", "tower", "bridge", "2023", "收入", "支出"]
captions = st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join)
scores = st.integers(0, 3).map(float)
pools = st.lists(st.tuples(captions, scores), min_size=1, max_size=6).map(
    lambda rows: [Candidate(f"d#page={n + 1}", score, text) for n, (text, score) in enumerate(rows)]
)
slot_sets = st.lists(st.sampled_from(WORDS), max_size=4, unique=True)


def objective(texts, relevance, weights, coefficients):
    """Eq. 2, term by term."""
    coverage = sum(weight for slot, weight in weights.items() if any(slot in text for text in texts))
    pairs = itertools.combinations(texts, 2)
    redundancy = sum(jaccard(tokens(left), tokens(right)) for left, right in pairs)
    return coefficients.alpha * coverage + coefficients.beta * sum(relevance) - coefficients.eta * redundancy


@settings(derandomize=True, max_examples=150, deadline=None)
@given(pool=pools, slots=slot_sets, before=st.lists(captions, max_size=3))
def test_sum_gain_is_the_marginal_of_the_objective(pool, slots, before):
    weights = RequirementState.uniform(slots).open_weights()
    coefficients = Coefficients(alpha=1.3, beta=0.7, eta=0.4, redundancy="sum")
    for candidate, b in zip(pool, min_max([candidate.score for candidate in pool])):
        without = objective(before, [0.5] * len(before), weights, coefficients)
        with_it = objective([*before, candidate.text], [0.5] * len(before) + [b], weights, coefficients)
        parts = gain(candidate.text, b, before, weights, coefficients)
        assert parts.total == pytest.approx(with_it - without, abs=1e-12)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(pool=pools, slots=slot_sets, before=st.lists(captions, max_size=3))
def test_one_page_without_anchor_is_the_brute_force_best(pool, slots, before):
    weights = RequirementState.uniform(slots).open_weights()
    coefficients = Coefficients(redundancy="sum")
    relevance = dict(zip((c.page_id for c in pool), min_max([c.score for c in pool])))
    base = [1.0] * len(before)
    values = {
        c.page_id: objective([*before, c.text], [*base, relevance[c.page_id]], weights, coefficients)
        for c in pool
    }
    [(chosen, _)] = admit(pool, 1, weights, coefficients, selected=before, anchor=False)
    assert values[chosen.page_id] == pytest.approx(max(values.values()), abs=1e-12)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(pool=pools, slots=slot_sets, k=st.integers(1, 6), seed=st.integers(0, 99))
def test_the_order_of_candidates_changes_nothing(pool, slots, k, seed):
    weights = RequirementState.uniform(slots).open_weights()
    shuffled = random.Random(seed).sample(pool, len(pool))
    for redundancy in ("max", "sum"):
        for anchor in (True, False):
            settings_ = Coefficients(redundancy=redundancy)
            expected = admit(pool, k, weights, settings_, anchor=anchor)
            assert admit(shuffled, k, weights, settings_, anchor=anchor) == expected


POOL = [
    Candidate("a#page=1", 10.0, "red tower plan"),
    Candidate("a#page=2", 9.0, "red tower plan"),
    Candidate("b#page=1", 6.0, "blue bridge height"),
    Candidate("b#page=2", 5.0, "grey"),
]


def test_by_hand():
    weights = RequirementState.uniform(["red", "height"]).open_weights()
    chosen = admit(POOL, 3, weights, Coefficients())
    assert [candidate.page_id for candidate, _ in chosen] == ["a#page=1", "b#page=1", "b#page=2"]
    (_, first), (_, second), (_, third) = chosen
    assert (first.coverage, first.relevance, first.redundancy) == (0.5, 0.5, 0.0)
    assert (second.coverage, second.relevance, second.redundancy) == (0.5, pytest.approx(0.1), 0.0)
    # The twin page scores 0.4 − 0.5 = −0.1, below the grey page's 0.
    assert third.total == 0.0
    assert first.record() == {"coverage": 0.5, "relevance": 0.5, "redundancy": 0.0, "total": 1.0}


def test_max_and_sum_redundancy_by_hand():
    before = ["red blue", "red green"]
    assert gain("red", 0.0, before, {}, Coefficients(eta=1.0)).redundancy == pytest.approx(0.5)
    summed = gain("red", 0.0, before, {}, Coefficients(eta=1.0, redundancy="sum"))
    assert summed.redundancy == pytest.approx(1.0)


def test_anchor_keeps_the_best_ranked_page_and_without_it_gain_decides():
    weights = RequirementState.uniform(["height", "bridge"]).open_weights()
    strong = Coefficients(alpha=10)
    assert admit(POOL, 1, weights, strong)[0][0].page_id == "a#page=1"
    assert admit(POOL, 1, weights, strong, anchor=False)[0][0].page_id == "b#page=1"


def test_selected_pages_already_cover_slots():
    weights = {"height": 1.0}
    covered = gain("blue bridge height", 0.0, ["the height of things"], weights, Coefficients())
    assert covered.coverage == 0.0
    assert gain("blue bridge height", 0.0, ["depth"], weights, Coefficients()).coverage == 1.0


def test_chinese_captions():
    pool = [
        Candidate("年报#page=1", 3.0, "公司简介"),
        Candidate("年报#page=2", 2.0, "公司简介与历史"),
        Candidate("年报#page=3", 1.0, "2023年总收入"),
    ]
    weights = RequirementState.uniform(["总收入", "2023年"]).open_weights()
    chosen = admit(pool, 2, weights, Coefficients())
    assert [candidate.page_id for candidate, _ in chosen] == ["年报#page=1", "年报#page=3"]
    assert chosen[1][1].coverage == 1.0


def test_small_pieces():
    assert min_max([]) == []
    assert min_max([2.0, 2.0]) == [1.0, 1.0]
    assert min_max([-1.0, 1.0, 3.0]) == [0.0, 0.5, 1.0]
    assert admit([], 5, {}, Coefficients()) == []
    assert admit(POOL, 0, {}, Coefficients()) == []
