"""Operator V inside real episodes, against slow versions of eqs. 4 and 5, by hand, and its promises."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from visor.env.config import EpisodeConfig
from visor.env.episode import Episode
from visor.env.prompts import load_prompts
from visor.env.tokens import estimate_tokens
from visor.models.smart_resize import smart_resize
from visor.retrieval.base import ScoredPage
from visor.taec.admission import Candidate, Coefficients, admit
from visor.taec.allocation import scaled
from visor.taec.captions import Captions
from visor.taec.config import AllocationConfig, TaecConfig
from visor.taec.pictures import MemoryPicture, PictureBudgets
from visor.taec.policy import TaecPolicy, make_evidence_policy
from visor.taec.text import occurs
from visor.types import Completion, Page, Question, Search

QUESTION = Question(question_id="q", text="height of the blue bridge 总收入")
PAGE, CROP = 300_000, 600_000
SIZE = (1000, 1400)


class Store:
    def __init__(self, captions):
        self.captions = captions

    def page(self, page_id):
        doc_id, _, number = page_id.partition("#page=")
        width, height = SIZE
        fields = {"image": "x.png", "width": width, "height": height, "caption": self.captions[page_id]}
        return Page(page_id=page_id, doc_id=doc_id, page_number=int(number), **fields)

    def pages(self):
        return list(map(self.page, self.captions))


class InOrder:
    name = "in order"

    def __init__(self, captions):
        self.captions = captions

    def search(self, query, k):
        return [ScoredPage(page_id, 1 / (n + 1)) for n, page_id in enumerate(self.captions)][:k]


TEXTS = ["blue bridge plan", "height of the blue bridge in metres", "", "grey", "公司总收入为五亿"]
CAPTIONS = {f"d#page={n}": text for n, text in enumerate([*TEXTS, "red", "x" * 80], 1)}
SEARCH = "<think>a thought about it</think><search>{}</search>"
CROPPED = "<think>look closer</think><bbox>[100,100,900,900]</bbox>"


def play(replies, switch="V", taec=None, store=None, **config):
    """Play scripted replies; returns the trajectory, with the context of a call to come in its meta."""
    store = store or Store(CAPTIONS)
    limits = {
        "page_min_pixels": 784,
        "page_max_pixels": PAGE,
        "crop_min_pixels": 784,
        "crop_max_pixels": CROP,
    }
    episode = Episode(
        QUESTION,
        InOrder(store.captions),
        EpisodeConfig(**(limits | config)),
        load_prompts("visor"),
        store,
        evidence_policy=make_evidence_policy(switch, TaecConfig(**(taec or {})), QUESTION, store),
    )
    for reply in replies:
        episode.context()
        episode.step(Completion(text=reply))
    context = [] if episode.done else episode.context()
    trajectory = episode.trajectory()
    trajectory.meta["next"] = context
    for turn in trajectory.turns:
        turn.retrieval_seconds = 0.0
    return trajectory


def contexts(trajectory):
    return [*(turn.context for turn in trajectory.turns), trajectory.meta["next"]]


def pictures(context):
    return [ref for message in context for ref in message.images]


def slow_pixels(shown, n_searches, retained, text_tokens, config, decay):
    """Eqs. 5 and 4 term by term for a chain of searches; `shown` and `retained` are (page_id, crop, node)."""

    def energy(item):
        _, crop, node = item
        rate = decay.crop if crop else decay.page
        own = 3 / 5 * (1 + (node < n_searches - 1)) * math.exp(-rate * (n_searches - 1 - node))
        held = [energy(other) for other in shown if other[2] == node + 1]
        return own + config.gamma * (sum(held) / len(held) if held else 0.0)

    def detail(item):
        page_id, crop, _ = item
        caption = CAPTIONS[page_id]
        longest = max(map(len, CAPTIONS.values()))
        slots = ["height", "blue", "bridge", "总收入"]
        support = sum(occurs(slot, caption) for slot in slots) / 4
        return 1.0 if crop else (len(caption) / longest + support) / 2

    x = min(max((text_tokens - config.pressure_onset_tokens) / config.pressure_onset_tokens, 0), 1)
    budget = config.budget_pixels * (1 + (config.pressure_factor * x if config.pressure else 0))
    crops = [item for item in retained if item[1]]
    result = {}
    for group in (crops, [item for item in retained if not item[1]]):
        both = crops and len(crops) < len(retained)
        part = budget * ((config.crop_share if group is crops else 1 - config.crop_share) if both else 1)
        r = [energy(item) for item in group]
        d = [detail(item) if config.detail else 1.0 for item in group]
        softmax = [math.exp(config.tau * a * b) for a, b in zip(r, d)]
        for item, a, weight in zip(group, r, softmax):
            plain = a / sum(r)
            result[item] = part * (config.kappa * plain + (1 - config.kappa) * weight / sum(softmax))
    return [result[item] for item in retained], budget


@pytest.mark.parametrize(
    "allocation",
    [
        {},
        {"kappa": 1.0},
        {"kappa": 0.0, "tau": 1.0},
        {"detail": False},
        {"pressure": False},
        {"pressure_onset_tokens": 300, "pressure_factor": -0.5},
    ],
)
def test_an_episode_equals_the_formulas_term_by_term(allocation):
    """Limits wide enough to bind nowhere, so that the pixels are the formula's own, rounded down."""
    wide = {"budget_pixels": 900_000, "min_pixels": 784, "page_max_pixels": 10**6, "crop_max_pixels": 10**7}
    allocation = wide | {"enabled": True} | allocation
    replies = [SEARCH.format("a"), SEARCH.format("b"), CROPPED, SEARCH.format("c"), SEARCH.format("d")]
    limits = {"page_max_pixels": 10**6, "crop_max_pixels": 10**7}
    trajectory = play(replies, "V", {"allocation": allocation}, window=None, **limits)
    config = TaecConfig(allocation=allocation)
    shown = [("d#page=1", False, 0), ("d#page=2", False, 1), ("d#page=2", True, 1), ("d#page=3", False, 2)]
    shown.append(("d#page=4", False, 3))
    context = trajectory.meta["next"]
    record = trajectory.meta["evidence_policy"]["allocations"][-1]
    tokens = estimate_tokens("\n".join(message.text for message in context))
    expected, budget = slow_pixels(shown, 4, shown[:-1], tokens, config.allocation, config.decay)
    assert record["text_tokens"] == tokens
    assert record["budget"] == int(budget)
    got = [ref.max_pixels for ref in pictures(context)[:-1]]
    assert got == [item["pixels"] for item in record["pictures"]]
    assert got == pytest.approx(expected, abs=2)
    if allocation.get("kappa") == 1.0:
        energy = [item["energy"] for item in record["pictures"]]
        pages = [0, 1, 3]
        total = sum(energy[i] for i in pages)
        assert [got[i] for i in pages] == pytest.approx(
            [budget * 0.4 * energy[i] / total for i in pages], rel=1e-4
        )


def test_by_hand():
    """Two pages of a chain of three searches are retained. Ω of node 1 is 0.6 · 2 · e^−0.1 + 0.3 · 0.6 =
    1.2658, of node 0 it is 0.6 · 2 · e^−0.2 + 0.3 · 1.2658 = 1.3622. κ = 1: 600,000 · 1.3622 / 2.6280 =
    311,003, over the limit of a page, so it gets 300,000 and the other all that is left, 300,000 too."""
    replies = [SEARCH.format(word) for word in "abc"]
    trajectory = play(replies, window=None, taec={"allocation": {"kappa": 1.0, "pressure": False}})
    first, second = trajectory.meta["evidence_policy"]["allocations"][-1]["pictures"]
    assert first["energy"] == pytest.approx(1.3622, abs=1e-4)
    assert second["energy"] == pytest.approx(1.2658, abs=1e-4)
    assert (first["pixels"], second["pixels"]) == (300_000, 300_000)
    halved = {"kappa": 1.0, "pressure": False, "budget_pixels": 300_000}
    trajectory = play(replies, window=None, taec={"allocation": halved})
    pixels = [item["pixels"] for item in trajectory.meta["evidence_policy"]["allocations"][-1]["pictures"]]
    assert pixels == pytest.approx([155_501, 144_499], abs=5)


@pytest.mark.parametrize("seed", range(30))
def test_promises_of_any_episode(seed):
    """The budget is never exceeded, the newest picture and the record are never touched, and what the policy
    asked for comes as without the layer."""
    chance = random.Random(seed)
    replies = []
    for _ in range(9):
        replies.append(
            chance.choice([SEARCH.format(chance.choice("abc")), SEARCH.format("a"), CROPPED, "no action"])
        )
    config = {"window": chance.choice([1, 2, 3, None]), "max_turns": 12}
    allocation = {
        "represent_pages": chance.choice([0, 0, 2, 5]),
        "budget_pixels": chance.choice([3_000, 20_000, 200_000, 600_000]),
        "kappa": chance.choice([0.0, 0.5, 1.0]),
        "pressure_factor": chance.choice([-0.5, 0.15]),
        "pressure_onset_tokens": 200,
    }
    plain = play(replies, "off", **config)
    layered = play(replies, "V", {"allocation": allocation}, **config)
    assert [turn.observation for turn in layered.turns] == [turn.observation for turn in plain.turns]
    assert [turn.action for turn in layered.turns] == [turn.action for turn in plain.turns]
    records = iter(layered.meta["evidence_policy"]["allocations"])
    for number, (context, before) in enumerate(zip(contexts(layered), contexts(plain))):
        assert [m.text for m in context if m.role != "user"] == [m.text for m in before if m.role != "user"]
        searches = sum(isinstance(turn.action, Search) for turn in layered.turns[:number])
        if searches < 2:
            assert context == before
            continue
        refs, old = pictures(context), pictures(before)
        if old:
            assert refs[-1] == old[-1]  # the newest picture, which is never one of the retained
        retained = refs[:-1] if old else refs
        if not retained and len(old) <= 1:
            assert context == before
            continue
        record = next(records)
        assert sum(ref.max_pixels for ref in retained) <= record["budget"]
        areas = [
            math.prod(smart_resize(*_size(ref), min_pixels=ref.min_pixels, max_pixels=ref.max_pixels))
            for ref in retained
        ]
        assert sum(areas) <= record["budget"]
        assert all(784 <= ref.max_pixels <= (CROP if ref.box else PAGE) for ref in retained)
        assert len(refs) <= len(old) + allocation["represent_pages"]
    assert next(records, None) is None


def _size(ref):
    if ref.box is None:
        return SIZE
    left, top, right, bottom = ref.box
    return right - left, bottom - top


@pytest.mark.parametrize("replies", [
    [SEARCH.format("a"), SEARCH.format("b"), SEARCH.format("c"), SEARCH.format("d")],
    [SEARCH.format("a"), CROPPED, SEARCH.format("b"), CROPPED, SEARCH.format("c")],
])  # fmt: skip
def test_under_the_papers_window_nothing_binds(replies):
    """W = 2 retains one picture, which the budget of two pages covers: V alone is the plain agent then."""
    plain, layered = (play(replies, switch) for switch in ("off", "V"))
    assert contexts(layered) == contexts(plain)


def test_earlier_pages_are_shown_again_by_energy():
    replies = [SEARCH.format(word) for word in "abcde"]
    trajectory = play(replies, taec={"allocation": {"represent_pages": 2}})
    context = trajectory.meta["next"]
    again = context[3]
    assert again.role == "user"
    assert [ref.page_id for ref in again.images] == ["d#page=2", "d#page=3"]
    assert again.text == "Page d#page=2:Page d#page=3:"
    assert context[2].text.startswith("COLLECTED EVIDENCE")
    assert [ref.page_id for ref in pictures(context)[2:]] == ["d#page=4", "d#page=5"]
    # Ω of the chain grows towards the end: node 0 has the least, so pages 2 and 3 are taken.
    record = trajectory.meta["evidence_policy"]["allocations"][-1]["pictures"]
    assert [item["page_id"] for item in record] == ["d#page=2", "d#page=3", "d#page=4"]


def test_a_picture_that_no_budget_is_left_for_is_left_out():
    replies = [SEARCH.format(word) for word in "abcd"]
    tight = {"budget_pixels": 7_000, "min_pixels": 3_136, "pressure": False}
    trajectory = play(replies, window=None, taec={"allocation": tight})
    context = trajectory.meta["next"]
    assert [item["pixels"] for item in trajectory.meta["evidence_policy"]["allocations"][-1]["pictures"]] == [
        3136, 3136, 0,
    ]  # fmt: skip
    assert len(pictures(context)) == 3
    texts = [turn.observation.message.text for turn in trajectory.turns]
    assert [message.text for message in context if message.role == "user"][-4:] == texts


def test_a_page_that_can_still_be_cropped_is_never_made_smaller():
    replies = [SEARCH.format("a"), SEARCH.format("b"), "no action", "no action"]
    trajectory = play(replies, window=None, taec={"allocation": {"budget_pixels": 5_000}})
    refs = pictures(trajectory.meta["next"])
    assert [ref.max_pixels for ref in refs][1] == PAGE
    assert refs[0].max_pixels <= 5_000


def test_budgets_are_in_proportion_to_the_pages_of_the_episode():
    config = scaled(AllocationConfig(), 12_544, 12_544)
    assert (config.budget_pixels, config.page_max_pixels, config.crop_max_pixels) == (25_088, 12_544, 12_544)
    assert config.min_pixels == 784
    assert scaled(AllocationConfig(), 300_000) == AllocationConfig()
    assert scaled(AllocationConfig(), 401_408, 802_816).crop_max_pixels == 802_816
    small = {"page_max_pixels": 12_544, "crop_max_pixels": 12_544, "window": None}
    trajectory = play([SEARCH.format(word) for word in "abcd"], **small)
    refs = pictures(trajectory.meta["next"])
    assert sum(ref.max_pixels for ref in refs[:-1]) <= 25_088
    assert refs[-1].max_pixels == 12_544


def test_the_same_pictures_in_any_order_get_the_same_pixels():
    budgets = PictureBudgets(AllocationConfig(), Captions(Store(CAPTIONS)), ["blue", "总收入"])
    memory = [MemoryPicture(page_id, 0.5 + n / 10) for n, page_id in enumerate(CAPTIONS)]
    given_ = {"text_tokens": 2500, "searches": 3, "page_max_pixels": PAGE}
    pixels = dict(zip(memory, budgets.allocate(memory, **given_)))
    shuffled = random.Random(1).sample(memory, len(memory))
    again = dict(zip(shuffled, budgets.allocate(shuffled, **given_)))
    assert again == pytest.approx(pixels, abs=1)
    assert budgets.record[0]["budget"] == 622_500


def test_a_semantic_state_is_not_a_visor_policys_to_report():
    with pytest.raises(ValueError, match="slot_weights to open"):
        TaecPolicy(TaecConfig(semantic_state=True), QUESTION, Store(CAPTIONS))


def test_tokens_are_estimated():
    assert estimate_tokens("") == 0
    assert estimate_tokens("abcde") == 2
    assert estimate_tokens("总收入 abc") == 4


texts = st.lists(st.sampled_from(["red", "blue", "bridge", "收入", "2023"]), max_size=5).map(" ".join)


@settings(derandomize=True, max_examples=120, deadline=None)
@given(rows=st.lists(st.tuples(texts, st.integers(0, 3)), max_size=8), k=st.integers(0, 6),
       redundancy=st.sampled_from(["max", "sum"]))  # fmt: skip
def test_admission_keeps_its_bound_and_the_anchor(rows, k, redundancy):
    pool = [Candidate(f"d#page={n + 1}", float(score), text) for n, (text, score) in enumerate(rows)]
    weights = {"blue": 0.5, "收入": 0.5}
    chosen = [c.page_id for c, _ in admit(pool, k, weights, Coefficients(redundancy=redundancy))]
    assert len(chosen) == min(k, len(pool)) == len(set(chosen))
    if chosen:
        best = max(candidate.score for candidate in pool)
        assert chosen[0] == next(c.page_id for c in pool if c.score == best)
