"""Analyses by kind of question and by kind of run: types, answerability, ablation, retrievers, pressure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rollout.analyses.study import Run, Study
from rollout.analyses.table import Cell, Table
from rollout.results import ResultRow

OPERATOR_ORDER = ("", "A", "M", "V", "AM", "AV", "MV", "AMV")


def ablation(study: Study) -> Table | str:
    """Table 7: the substrate, each operator of TAEC alone and together; difference to the substrate."""
    rows: list[list[Cell]] = []
    seen: list[Run] = []
    for substrate in study.runs:
        layered = [run for run in study.layered if study.substrate_of(run) is substrate]
        layered.sort(key=lambda run: OPERATOR_ORDER.index(run.operators))
        for run in (substrate, *layered) if layered else ():
            label = "+".join(run.operators) if run.operators else "substrate"
            delta = None
            if run is not substrate:
                delta = study.frame.difference(substrate.accuracy(), run.accuracy())
            label = label if run is substrate else f"+{label}" if len(run.operators) == 1 else label
            rows.append([run.name, label, study.frame.n, study.frame.figure(run.accuracy()), delta])
            seen.append(run)
    if not rows:
        return "needs a run under the TAEC layer and a plain run of the same system and model"
    return Table("ablation", "Ablation", ("run", "operators", "n", "accuracy", "difference"), rows)


def by_type(study: Study) -> Table | str:
    """Table 10: single and multi hop, and the modality of the evidence over questions with exactly one
    source."""
    classes: dict[str, np.ndarray] = {}
    for label, of in (("hop", _hop), ("evidence", _only_source)):
        values = {value for row in study.baseline.first_samples if (value := of(row))}
        for value in sorted(values):
            name = f"{label}: {value}"
            classes[name] = study.subset(study.baseline, _valued(of, value))
    if not classes:
        return "needs questions with the tags hop or evidence_sources"
    rows = _by_class(study, classes)
    return Table("types", "By type of question", ("type", "run", "n", "accuracy", "difference"), rows)


def _valued(of: Callable[[ResultRow], str | None], value: str) -> Callable[[ResultRow], bool]:
    return lambda row: of(row) == value


def _hop(row: ResultRow) -> str | None:
    return str(row.tags["hop"]) if row.tags.get("hop") else None


def _only_source(row: ResultRow) -> str | None:
    sources = row.tags.get("evidence_sources")
    return str(sources[0]) if isinstance(sources, list) and len(sources) == 1 else None


def unanswerable(study: Study) -> Table | str:
    """Table 11: accuracy over all questions, the answerable and the unanswerable ones."""
    answerable = study.subset(study.baseline, lambda row: row.tags.get("answerable") is not False)
    if answerable.all():
        return "needs questions tagged as not answerable"
    classes = {
        "all": np.ones(study.frame.n, dtype=bool),
        "answerable": answerable,
        "unanswerable": ~answerable,
    }
    rows = _by_class(study, classes)
    header = ("questions", "run", "n", "accuracy", "difference")
    return Table("unanswerable", "Answerable and unanswerable questions", header, rows)


def _by_class(study: Study, classes: dict[str, np.ndarray]) -> list[list[Cell]]:
    """Accuracy of each run on each class, and its difference to the first run."""
    base = study.baseline
    return [
        [
            name,
            run.name,
            int(subset.sum()),
            study.frame.figure(run.accuracy().where(subset)),
            None
            if run is base
            else study.frame.difference(base.accuracy().where(subset), run.accuracy().where(subset)),
        ]
        for name, subset in classes.items()
        if subset.any()
        for run in study.runs
    ]


def control(study: Study) -> Table | str:
    """Table 18: for each retriever vanilla, DAG and TAEC, and TAEC's difference to the stronger of both.

    Runs of different fingerprints are never in one row.
    """
    rows: list[list[Cell]] = []
    for fingerprint in dict.fromkeys(run.fingerprint for run in study.all_runs):
        group = replace(study, runs=[run for run in study.all_runs if run.fingerprint == fingerprint])
        for taec in group.layered:
            substrate = group.substrate_of(taec)
            vanilla = _like(group, taec, lambda run: run.system == "vanilla")
            others = [run for run in (vanilla, substrate) if run is not None]
            if not others:
                continue
            stronger = max(others, key=lambda run: run.accuracy().value or 0.0)
            figure = study.frame.figure
            rows.append(
                [
                    f"{taec.retriever} {fingerprint}".strip(),
                    taec.name,
                    figure(vanilla.accuracy()) if vanilla else None,
                    figure(substrate.accuracy()) if substrate else None,
                    figure(taec.accuracy()),
                    stronger.name,
                    study.frame.difference(stronger.accuracy(), taec.accuracy()),
                ]
            )
    if not rows:
        return "needs a run under the TAEC layer, and its plain or a vanilla run of the same retriever"
    header = ("retriever", "run", "vanilla", "plain", "TAEC", "stronger", "difference")
    return Table("retrievers", "Retriever control", header, rows)


def _like(study: Study, run: Run, holds: Callable[[Run], bool]) -> Run | None:
    """The first run with the same model and intervention for which it holds."""
    same = ("model", "pressure_tokens", "frozen")
    return next(
        (
            other
            for other in study.runs
            if holds(other) and all(getattr(other, name) == getattr(run, name) for name in same)
        ),
        None,
    )


def pressure(study: Study) -> Table | str:
    """Table 12: runs that differ in the neutral tokens added alone, against the one with the fewest."""
    if not any(run.pressure_tokens for run in study.runs):
        return "needs runs made with --pressure_tokens"
    kinds: dict[tuple, list[Run]] = {}
    for run in study.runs:
        kinds.setdefault((run.system, run.operators, run.model, run.frozen), []).append(run)
    rows: list[list[Cell]] = []
    notes = []
    for members in kinds.values():
        if len(members) < 2 or not any(run.pressure_tokens for run in members):
            continue
        members.sort(key=lambda run: run.pressure_tokens)
        least = members[0]
        for run in members:
            delta = None if run is least else study.frame.difference(least.accuracy(), run.accuracy())
            accuracy = study.frame.figure(run.accuracy())
            rows.append([run.name, run.pressure_tokens, study.frame.n, accuracy, delta])
        if not least.frozen:
            notes.append(f"the retrieval of {least.name} was not frozen")
    if not rows:
        return "needs runs that differ in --pressure_tokens alone, retrieval frozen to the same run"
    return Table(
        "pressure", "Context pressure", ("run", "tokens", "n", "accuracy", "difference"), rows, notes
    )
