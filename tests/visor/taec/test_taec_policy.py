"""The layer's decisions in one episode, and its switches."""

from __future__ import annotations

import json

import pytest

from visor.env.policy import EpisodeView, EvidenceEntry, PassThrough
from visor.retrieval.base import ScoredPage
from visor.taec.config import AdmissionConfig, ExposureConfig, TaecConfig
from visor.taec.policy import TaecPolicy, make_evidence_policy, switched
from visor.taec.requirements import SlotSet
from visor.types import Page, Question

QUESTION = Question(question_id="q", text="height of the blue bridge")
PAGES = {
    "a#page=1": ("blue tower plan", ""),
    "a#page=2": ("blue tower plan", ""),
    "a#page=3": ("green gate", ""),
    "b#page=1": ("", "the bridge has a height of 9"),
    "b#page=2": ("", ""),
}
HITS = [ScoredPage(page_id, 10.0 - rank) for rank, page_id in enumerate(PAGES)]


class Store:
    def page(self, page_id):
        doc_id, _, number = page_id.partition("#page=")
        caption, text = PAGES[page_id]
        fields = {"image": "x.png", "width": 10, "height": 10, "caption": caption, "text": text}
        return Page(page_id=page_id, doc_id=doc_id, page_number=int(number), **fields)


def policy(switch="on", **config):
    return make_evidence_policy(switch, TaecConfig(**config), QUESTION, Store())


def view(shown=(), queries=(), entries=()):
    return EpisodeView(QUESTION, list(shown), list(queries), list(entries))


class TestAdmission:
    def test_a_new_query_keeps_the_best_unseen_page(self):
        layer = policy()
        assert layer.select("blue bridge", HITS, view()) == "a#page=1"
        assert layer.select("height", HITS, view(["a#page=1"], ["blue bridge"])) == "a#page=2"

    def test_a_repeated_query_takes_the_page_of_largest_gain(self):
        layer = policy()
        after = view(["a#page=1"], ["Height of the\n blue BRIDGE"])
        assert layer.select("height of the blue  bridge", HITS, after) == "b#page=1"
        [record] = layer.describe()["searches"]
        # Unseen scores 9, 8, 7, 6 → b = 1/3. Slots height, bridge of height, blue, bridge are open: 2/3.
        # Jaccard with "blue tower plan" is 0.
        assert record["gain"] == {
            "coverage": 0.666667,
            "relevance": 0.166667,
            "redundancy": 0.0,
            "total": 0.833333,
        }
        assert record["repeated"] is True
        assert (record["pool"], record["unseen"], record["rank"]) == (5, 4, 3)
        assert (record["admitted"], record["text"]) == ("b#page=1", "page text")

    def test_redundancy_steers_away_from_a_twin_page(self):
        repeated = view(["a#page=1"], ["q"])
        assert policy(admission={"alpha": 0.0}).select("q", HITS, repeated) == "a#page=3"
        assert policy(admission={"alpha": 0.0, "eta": 0.0}).select("q", HITS, repeated) == "a#page=2"

    def test_open_weights_forget_what_the_evidence_mentions(self):
        entries = [EvidenceEntry("a#page=1", pre="bridge of unknown height")]
        after = view(["a#page=1"], ["q"], entries)
        admission = {"beta": 0.0, "eta": 0.0, "slot_weights": "open"}
        layer = policy(admission=admission)
        assert layer.select("q", HITS, after) == "a#page=2"  # no slot is open, so the first by rank
        assert layer.describe()["searches"][0]["gain"]["total"] == 0.0

    def test_nothing_unseen(self):
        layer = policy()
        assert layer.select("q", HITS, view(list(PAGES), ["q"])) is None
        assert layer.select("q", [], view()) is None
        assert [record["unseen"] for record in layer.describe()["searches"]] == [0, 0]

    def test_equal_scores_do_not_depend_on_their_order(self):
        level = [ScoredPage(hit.page_id, 1.0) for hit in HITS]
        repeated = view([], ["q"])
        assert policy().select("q", level, repeated) == policy().select("q", level[::-1], repeated)

    def test_pool(self):
        assert policy().pool_size(10) == 25
        assert policy().pool_size(40) == 40
        assert policy("M").pool_size(10) == 10
        with pytest.raises(ValueError, match="50"):
            AdmissionConfig(pool_size=51)


ENTRIES = [
    EvidenceEntry(
        "a#page=1", pre="A plan. It clearly shows 3 towers. More.", search_index=0, in_window=False
    ),
    EvidenceEntry("a#page=2", pre="Height not found here.", search_index=1, in_window=False),
    EvidenceEntry("a#page=3", pre="A gate, perhaps.", post="Still a gate.", search_index=2, in_window=False),
    EvidenceEntry("b#page=1", pre="Unclear.", post="The answer is 9.", search_index=3, in_window=False),
    EvidenceEntry("b#page=2", pre="Not found.", search_index=4, in_window=False),
]
EPISODE = view(list(PAGES), ["q one", "q two", "q three", "q four", "q five"], ENTRIES)


class TestExposure:
    def test_the_three_forms_outside_the_window(self):
        layer = policy()
        assert [layer.render(entry, EPISODE) for entry in ENTRIES] == [
            ["It clearly shows 3 towers."],
            ['search "q two": nothing usable here'],
            ["A gate, perhaps.", "Still a gate."],
            ["The answer is 9."],
            ["Not found."],  # the newest is in full
        ]
        assert ENTRIES[0].pre == "A plan. It clearly shows 3 towers. More."

    def test_inside_the_window_all_is_in_full(self):
        entry = EvidenceEntry("a#page=1", pre="Not found.", search_index=0, in_window=True)
        assert policy().render(entry, view(["a#page=1"], ["q"] * 5, [entry, *ENTRIES[1:]])) == ["Not found."]

    def test_keep_newest(self):
        assert policy(exposure={"keep_newest": 0}).render(ENTRIES[4], EPISODE) != ["Not found."]
        assert policy(exposure={"keep_newest": 4}).render(ENTRIES[1], EPISODE) == ENTRIES[1].thoughts

    def test_each_change_of_form_is_recorded_once(self):
        layer = policy()
        fresh = EvidenceEntry("a#page=2", pre="Height not found here.", search_index=0)
        layer.render(fresh, view(["a#page=2"], ["q"], [fresh]))
        for _ in range(3):
            layer.render(ENTRIES[1], EPISODE)
        [record] = layer.describe()["renders"]
        assert record == {"page_id": "a#page=2", "searches": 5, "role": "failed", "persistence": 1.0}

    def test_trace_and_cues_can_be_replaced(self, tmp_path):
        cues = tmp_path / "cues.yaml"
        cues.write_text("failure: {patterns: [plan]}\nconfidence: {patterns: [zzz]}\n")
        layer = policy(exposure={"trace": "no {query}", "cues": str(cues)})
        assert layer.render(ENTRIES[0], EPISODE) == ["no q one"]


class TestSwitches:
    def test_letters_turn_on_just_these_operators(self):
        assert make_evidence_policy("off", None, QUESTION, Store()) is None
        assert policy("on").name == "taec-AM"
        assert policy("a").name == "taec-A"
        assert policy("MA").name == "taec-AM"
        assert policy("v").name == "taec-V"
        assert policy("AMV").name == "taec-AMV"
        assert switched("on", TaecConfig().for_dag()).operators == "AMV"
        assert switched("on", TaecConfig(allocation={"enabled": False}).for_dag()).operators == "AM"
        assert policy("on", exposure={"enabled": False}).name == "taec-A"
        assert policy("M", admission={"alpha": 3.0}).config.admission.alpha == 3.0

    @pytest.mark.parametrize("switch", ["", "yes", "AX", "A M"])
    def test_other_words_are_refused(self, switch):
        with pytest.raises(ValueError, match="TAEC"):
            switched(switch)

    def test_a_model_extractor_needs_its_slots(self):
        with pytest.raises(ValueError, match="ModelSlotExtractor"):
            policy(slot_extractor="model")
        slots = SlotSet(("gate",), "model", 1)
        layer = TaecPolicy(TaecConfig(slot_extractor="model"), QUESTION, Store(), slots)
        assert layer.describe()["slots"] == {"keywords": ["gate"], "extractor": "model", "model_calls": 1}

    def test_one_operator_leaves_the_other_as_the_plain_agent(self):
        plain = PassThrough()
        repeated = view(["a#page=1"], ["q"])
        assert policy("M").select("q", HITS, repeated) == plain.select("q", HITS, repeated)
        assert policy("A").render(ENTRIES[1], EPISODE) == plain.render(ENTRIES[1], EPISODE)

    def test_all_operators_off_is_the_plain_agent(self):
        off = TaecConfig(admission=AdmissionConfig(enabled=False), exposure=ExposureConfig(enabled=False))
        layer, plain = TaecPolicy(off, QUESTION, Store()), PassThrough()
        repeated = view(["a#page=1"], ["q"])
        assert layer.pool_size(10) == plain.pool_size(10)
        assert layer.select("q", HITS, repeated) == plain.select("q", HITS, repeated)
        assert [layer.render(e, EPISODE) for e in ENTRIES] == [plain.render(e, EPISODE) for e in ENTRIES]
        assert (layer.name, layer.describe()) == (plain.name, plain.describe())

    def test_the_record_is_plain_json(self):
        layer = policy()
        layer.select("q", HITS, view([], ["q"]))
        layer.render(ENTRIES[0], EPISODE)
        described = json.loads(json.dumps(layer.describe()))
        assert described["operators"] == "AM"
        assert described["settings"]["admission"]["eta"] == 0.5
        assert described["slots"]["keywords"] == ["height", "blue", "bridge"]
