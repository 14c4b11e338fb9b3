"""Settings of the layer. The paper prints no coefficient: the values here are ours, except where noted."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from visor.config import Config


class AdmissionConfig(Config):
    """Operator A, eq. 2."""

    enabled: bool = True
    alpha: float = 1.0
    """α_A, weight of the coverage of open slots."""
    beta: float = 0.5
    """β_A, weight of the retriever's score, normalised over the pool."""
    eta: float = 0.5
    """η_A, weight of the redundancy with pages admitted before."""
    redundancy: Literal["max", "sum"] = "max"
    """max: as the paper ran it. sum: eq. 2 as printed."""
    pool_size: int = Field(25, ge=1, le=50)
    """Candidates asked of the retriever. 25 and the bound 50 are the paper's (5 × 5 pages a search)."""
    slot_weights: Literal["uniform", "open"] = "uniform"
    """uniform: every slot keeps its weight (as the paper ran it). open: a slot that the evidence written so
    far mentions carries none."""


class ExposureConfig(Config):
    """Operator M, eq. 3."""

    enabled: bool = True
    keep_newest: int = Field(1, ge=0)
    """Entries of the newest searches that are shown in full even when they have left the window."""
    text_budget_tokens: int | None = Field(4000, ge=0)
    """L_t of eq. 1: tokens of the evidence, or of the graph, in a prompt (four UTF-8 bytes each). Over it,
    older entries are shown in one sentence and then left out, the oldest first; what `keep_newest` and the
    window keep in full counts and stays. null = no bound."""
    trace: str = 'search "{query}": nothing usable here'
    """The line for an entry of a failed branch; `{query}` becomes the query."""
    cues: Path | None = None
    """A cue file in the form of the shipped one; None = the shipped one."""


class DecayConfig(Config):
    """λ_g of eqs. 3 and 5, per node of age."""

    page: float = Field(0.1, ge=0)
    """The value of the VimRAG demo."""
    crop: float = Field(0.05, ge=0)
    text: float = Field(0.0, ge=0)


class AllocationConfig(Config):
    """Operator V, eqs. 4 and 5. Pixels are width × height, for pages of `page_max_pixels`; where an agent
    shows pages at another size, all of them are in proportion to it."""

    enabled: bool | None = None
    """null = with the system dag. A VISOR policy has seen earlier pictures at full size only, so there it is
    asked for by name."""
    gamma: float = Field(0.3, ge=0)
    """γ, share of a child node's mean energy passed to its parent (the value of the VimRAG demo)."""
    kappa: float = Field(0.5, ge=0, le=1)
    """κ, share of the budget given by relevance alone; 1 = the plain rule."""
    tau: float = Field(2.0, ge=0)
    """τ_V, concentration of the rest."""
    budget_pixels: int = Field(600_000, gt=0)
    """B_0, shared by all re-presented images (the paper's)."""
    pressure: bool = True
    """False = the ablation with B_t = B_0."""
    pressure_factor: float = Field(0.15, gt=-1)
    """B_t = B_0 · (1 + factor · x). The paper lets the budget grow with the prompt in one place and states it
    as fixed in another, so a negative factor is allowed."""
    pressure_onset_tokens: int = Field(2000, gt=0)
    """Text tokens of the prompt from which x grows."""
    detail: bool = True
    """False = the ablation with d = 1."""
    min_pixels: int = Field(4 * 28 * 28, gt=0)
    page_max_pixels: int = Field(300_000, gt=0)
    crop_max_pixels: int = Field(600_000, gt=0)
    crop_share: float = Field(0.6, ge=0, le=1)
    """Share of B_t for crops when pages and crops are both present."""
    represent_pages: int = Field(0, ge=0)
    """Pages outside the window of a VISOR policy that are shown again, those of most energy; the trained
    policy has seen none. The DAG agent has `loop.memory_images`."""


class TaecConfig(Config):
    """The whole layer; `enabled` of each operator is what the switches A, M, V set."""

    slot_extractor: Literal["rules", "model"] = "rules"
    """rules: content words of the question, no call. model: one call a question (the paper)."""
    max_slots: int = Field(4, ge=1)
    """The paper's."""
    semantic_state: bool = False
    """The DAG agent reports with each summary which slots are settled, and those carry no weight any more
    (off in the paper's runs). A VISOR policy has no words for it; see `admission.slot_weights`."""
    admission: AdmissionConfig = AdmissionConfig()
    exposure: ExposureConfig = ExposureConfig()
    decay: DecayConfig = DecayConfig()
    allocation: AllocationConfig = AllocationConfig()

    @property
    def operators(self) -> str:
        """Letters of the enabled operators, in the order A, M, V."""
        enabled = {
            "A": self.admission.enabled,
            "M": self.exposure.enabled,
            "V": self.allocation.enabled,
        }
        return "".join(letter for letter, on in enabled.items() if on)

    def for_dag(self) -> TaecConfig:
        """The settings with what only the DAG agent turns on by itself."""
        if self.allocation.enabled is not None:
            return self
        return self.model_copy(update={"allocation": self.allocation.model_copy(update={"enabled": True})})
