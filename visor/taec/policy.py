"""The layer over a trained VISOR policy: TAEC's operators as an `EvidencePolicy`."""

from __future__ import annotations

from collections.abc import Sequence

from visor.env.policy import EpisodeView, EvidenceEntry, EvidencePolicy, ShownPicture
from visor.env.tokens import estimate_tokens
from visor.retrieval.base import ScoredPage
from visor.taec.admission import Candidate, Coefficients, admit, gain
from visor.taec.captions import Captions
from visor.taec.config import TaecConfig
from visor.taec.energy import MemoryItem, energies, strongest
from visor.taec.evidence_exposure import EvidenceExposure
from visor.taec.pictures import MemoryPicture, PictureBudgets
from visor.taec.requirements import RequirementState, SlotSet, rule_slots
from visor.taec.text import normalise
from visor.types import Message, PageStore, Question


class TaecPolicy:
    """Decides, for one episode, which page a search shows (A), how old evidence is shown again (M) and at how
    many pixels the pictures of earlier turns are (V).

    With every operator off it is the plain agent: same pool, same page, same lines and pictures, nothing
    recorded.
    """

    def __init__(
        self,
        config: TaecConfig,
        question: Question,
        store: PageStore,
        slots: SlotSet | None = None,
        captions: Captions | None = None,
    ):
        """`slots`: as extracted before the episode; None = the rules (ValueError when the config asks for a
        model, whose call only the caller can make). `captions`: of `store`, shared by many episodes.

        ValueError for a semantic state, which a VISOR policy does not report.
        """
        if config.semantic_state:
            raise ValueError(
                "semantic_state is for the system dag: a VISOR policy does not report which slots are "
                "settled. Set admission.slot_weights to open, which reads it from the evidence"
            )
        if slots is None and config.operators and config.slot_extractor == "model":
            raise ValueError(
                "slot_extractor is 'model', but no slots were given: extract them with ModelSlotExtractor "
                "before the episode, or set slot_extractor to 'rules'"
            )
        self.config = config
        self.question = question
        self.captions = captions or Captions(store)
        self.slots = slots or rule_slots(question.text, config.max_slots)
        admission = config.admission
        self.coefficients = Coefficients(admission.alpha, admission.beta, admission.eta, admission.redundancy)
        self.name = f"taec-{config.operators}" if config.operators else "none"
        self._searches: list[dict] = []
        self._exposure = EvidenceExposure(config.exposure, config.decay.text)
        self._budgets = PictureBudgets(config.allocation, self.captions, self.slots.keywords)

    # ------------------------------------------------------------ admission

    def pool_size(self, top_k: int) -> int:
        """The paper's over-sampled pool; never below the plain agent's own `top_k`."""
        admission = self.config.admission
        return max(top_k, admission.pool_size) if admission.enabled else top_k

    def select(self, query: str, candidates: Sequence[ScoredPage], view: EpisodeView) -> str | None:
        """The retriever's best unseen page for a new query; for a repeated one, the page of largest gain.

        A query is repeated when it equals an earlier one up to case and white space. S of eq. 2 are all
        pages shown so far.
        """
        seen = set(view.shown_page_ids)
        unseen = [hit for hit in candidates if hit.page_id not in seen]
        if not self.config.admission.enabled:
            return unseen[0].page_id if unseen else None
        repeated = normalise(query) in {normalise(earlier) for earlier in view.queries}
        record = {"query": query, "repeated": repeated, "pool": len(candidates), "unseen": len(unseen)}
        self._searches.append(record)
        if not unseen:
            return None
        pool = [Candidate(hit.page_id, hit.score, self.captions.text(hit.page_id)) for hit in unseen]
        shown = [self.captions.text(page_id) for page_id in view.shown_page_ids]
        open_weights = self._requirements(view).open_weights()
        if repeated:
            [(chosen, parts)] = admit(pool, 1, open_weights, self.coefficients, selected=shown, anchor=False)
        else:
            chosen = pool[0]
            # The anchor's score is the pool's largest, so its normalised relevance is 1.
            parts = gain(chosen.text, 1.0, shown, open_weights, self.coefficients)
        record |= {
            "admitted": chosen.page_id,
            "rank": next(rank for rank, hit in enumerate(candidates) if hit.page_id == chosen.page_id),
            "gain": parts.record(),
            "text": self.captions.kind(chosen.page_id),
        }
        return chosen.page_id

    def _requirements(self, view: EpisodeView) -> RequirementState:
        state = RequirementState.uniform(self.slots.keywords)
        if self.config.admission.slot_weights == "open":
            state.add_support(thought for entry in view.entries for thought in entry.thoughts)
        return state

    # ------------------------------------------------------------ exposure

    def render(self, entry: EvidenceEntry, view: EpisodeView) -> list[str]:
        """The lines of an evidence entry, in the form of its role; see `EvidenceExposure`."""
        return self._exposure.render(entry, view) if self.config.exposure.enabled else entry.thoughts

    # ------------------------------------------------------------ allocation

    def represent(self, earlier: Sequence[ShownPicture], view: EpisodeView) -> list[ShownPicture]:
        """The `represent_pages` pages of most energy; none before the second search."""
        count = self.config.allocation.represent_pages
        if not (count and self._allocates(view)):
            return []
        energy = self._energy(view)
        chosen = strongest([energy[picture.turn_index] for picture in earlier], count)
        return [earlier[index] for index in chosen]

    def allocate(
        self, pictures: Sequence[ShownPicture], context: Sequence[Message], view: EpisodeView
    ) -> list[int]:
        """Eq. 4 over the pictures of earlier turns, once there are two searches."""
        if not (pictures and self._allocates(view)):
            return [picture.image.max_pixels for picture in pictures]
        energy = self._energy(view)
        memory = [
            MemoryPicture(p.image.page_id, energy[p.turn_index], p.image.box is not None) for p in pictures
        ]
        return self._budgets.allocate(
            memory,
            text_tokens=estimate_tokens("\n".join(message.text for message in context)),
            searches=len(view.queries),
            page_max_pixels=view.page_max_pixels,
            crop_max_pixels=max((p.image.max_pixels for p in pictures if p.image.box), default=None),
        )

    def _allocates(self, view: EpisodeView) -> bool:
        return bool(self.config.allocation.enabled) and len(view.queries) >= 2

    def _energy(self, view: EpisodeView) -> dict[int, float]:
        """Ω of each picture, by the turn that showed it. The graph is a chain: one node a search, child of
        the one before; the policy reports no priority, so each has the middle one."""
        parents: list[list[int]] = [[node - 1] if node else [] for node in range(len(view.queries))]
        items = [
            MemoryItem(picture.search_index, "crop" if picture.image.box else "page")
            for picture in view.pictures
        ]
        allocation, decay = self.config.allocation, self.config.decay.model_dump()
        energy = energies(parents, items, decay=decay, gamma=allocation.gamma)
        return {picture.turn_index: value for picture, value in zip(view.pictures, energy)}

    # ------------------------------------------------------------ record

    def describe(self) -> dict:
        """Operators, settings, slots and every decision; {} with all operators off, as for the plain agent.

        A search names its query, pool, admitted page, its rank and gain parts, and the kind of text the page
        was judged by. A render is listed when the form of an entry changes; an entry starts in full. An
        allocation is listed for each context with a picture of an earlier turn.
        """
        operators = self.config.operators
        if not operators:
            return {}
        return {
            "operators": operators,
            "settings": self.config.model_dump(mode="json"),
            "slots": self.slots.record(),
            "searches": [dict(record) for record in self._searches],
            "renders": [dict(record) for record in self._exposure.record],
            "allocations": [dict(record) for record in self._budgets.record],
        }


def switched(switch: str, config: TaecConfig | None = None) -> TaecConfig | None:
    """The config under a switch: "off" = None, "on" = as configured, letters = just these operators.

    ValueError for any other word.
    """
    config = config or TaecConfig()
    word = switch.strip()
    if word.lower() == "off":
        return None
    if word.lower() != "on":
        letters = set(word.upper())
        if not letters or letters - set("AMV"):
            raise ValueError(
                f"the TAEC switch is {switch!r}; expected on, off, or operator letters such as A, M or AMV"
            )
        config = config.model_copy(
            update={
                name: getattr(config, name).model_copy(update={"enabled": letter in letters})
                for letter, name in (("A", "admission"), ("M", "exposure"), ("V", "allocation"))
            }
        )
    return config


def make_evidence_policy(
    switch: str,
    config: TaecConfig | None,
    question: Question,
    store: PageStore,
    slots: SlotSet | None = None,
    captions: Captions | None = None,
) -> EvidencePolicy | None:
    """The evidence policy of one episode: None when the switch is "off" (the plain agent), else the layer.

    `switch`: see `switched`. `slots`: needed when the config's slot extractor is a model. `captions`: of
    `store`, for many episodes over one corpus.
    """
    active = switched(switch, config)
    return None if active is None else TaecPolicy(active, question, store, slots, captions)
