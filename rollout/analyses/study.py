"""The runs of a comparison, what each was made with, and the parts they play in the analyses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollout.analyses.frame import Filter, Frame, Measure, Value, measure
from rollout.analyses.prices import Prices
from rollout.analyses.table import Table
from rollout.results import ResultRow


@dataclass(frozen=True)
class Run:
    """One system on the common questions."""

    name: str
    questions: Sequence[Sequence[ResultRow]]
    """For each common question, in the same order in all runs, the rows of its samples by sample index."""
    system: str = ""
    operators: str = ""
    """Of its TAEC layer; "" = none."""
    model: str = ""
    retriever: str = ""
    fingerprint: str = ""
    judge: str = ""
    pressure_tokens: int = 0
    """Neutral tokens added to every prompt."""
    frozen: str = ""
    """Hash of the recorded searches that stood in for the retriever; "" = none."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the episode or the loop."""

    @property
    def first_samples(self) -> list[ResultRow]:
        """The row of each question's first sample: what a reference run is read by."""
        return [rows[0] for rows in self.questions]

    def measure(self, value: Value, of: Filter | None = None) -> Measure:
        return measure(self.questions, value, of)

    def accuracy(self, of: Filter | None = None) -> Measure:
        return self.measure(lambda row: row.correct, of)


@dataclass(frozen=True)
class Study:
    """Runs over the same questions, of one retriever except for `control`."""

    runs: Sequence[Run]
    frame: Frame
    reference: Run | None = None
    """Whose number of searches tells how hard a question is."""
    vanilla: Run | None = None
    prices: Prices | None = None
    all_runs: Sequence[Run] = ()
    """Of every retriever."""

    @property
    def baseline(self) -> Run:
        """The run that others are compared with: the first."""
        return self.runs[0]

    @property
    def layered(self) -> list[Run]:
        return [run for run in self.runs if run.operators]

    def substrate_of(self, run: Run) -> Run | None:
        """The plain run of the same system and model under the same intervention."""
        same = ("system", "model", "fingerprint", "pressure_tokens", "frozen")
        found = (
            other
            for other in self.runs
            if not other.operators and all(getattr(other, name) == getattr(run, name) for name in same)
        )
        return next(found, None)

    def subset(self, run: Run, holds: Callable[[ResultRow], object]) -> np.ndarray:
        """(questions,) truth values: which questions' first sample in `run` it holds for."""
        return np.array([bool(holds(row)) for row in run.first_samples], dtype=bool)


Analysis = Callable[[Study], Table | str]
"""A table, or what it lacks."""


def with_roles(study: Study, reference: str | None = None, vanilla: str | None = None) -> Study:
    """The study with its reference and vanilla run: those named, else the first react run (or the first run)
    and the first vanilla run. A run named that is of another retriever plays no part here."""

    def named(name: str | None, system: str) -> Run | None:
        if name is not None:
            return next((run for run in study.runs if run.name == name), None)
        return next((run for run in study.runs if run.system == system and not run.pressure_tokens), None)

    found = named(reference, "react")
    if found is None and reference is None:
        found = study.runs[0]
    return replace(study, reference=found, vanilla=named(vanilla, "vanilla"))
