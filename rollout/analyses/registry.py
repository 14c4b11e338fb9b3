"""The analyses in the order in which they are printed, and how all of them are made."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from rollout.analyses.behaviour import behaviour, judges
from rollout.analyses.cost import cost, tokens
from rollout.analyses.coverage import abilities, coverage, distinct_pages, four_groups, matched, no_search
from rollout.analyses.depth import depth, difficulty, over_search_price, stopping, within_k
from rollout.analyses.frame import Frame
from rollout.analyses.groups import ablation, by_type, control, pressure, unanswerable
from rollout.analyses.prices import Prices
from rollout.analyses.samples import samples
from rollout.analyses.study import Analysis, Run, Study, with_roles
from rollout.analyses.table import Table

ANALYSES: dict[str, Analysis] = {
    "coverage": coverage,
    "groups": four_groups,
    "ablation": ablation,
    "depth": depth,
    "difficulty": difficulty,
    "matched": matched,
    "stopping": stopping,
    "within-k": within_k,
    "price": over_search_price,
    "abilities": abilities,
    "no-search": no_search,
    "distinct": distinct_pages,
    "types": by_type,
    "unanswerable": unanswerable,
    "cost": cost,
    "tokens": tokens,
    "behaviour": behaviour,
    "samples": samples,
    "judges": judges,
    "pressure": pressure,
}
"""Each over the runs of one retriever."""
RETRIEVERS = "retrievers"
NAMES = (*ANALYSES, RETRIEVERS)


def analyse(
    runs: Sequence[Run],
    resamples: int,
    seed: int = 0,
    *,
    only: Collection[str] = (),
    reference: str | None = None,
    vanilla: str | None = None,
    prices: Prices | None = None,
) -> tuple[list[Table], dict[str, str]]:
    """All tables of the runs, and for each that cannot be made what it lacks.

    Runs of different retriever fingerprints are never in one table, the retriever control apart: each
    fingerprint has tables of its own. ValueError for an unknown name in `only`, and for a reference or
    vanilla run that is none of the runs.
    """
    _check(runs, only, reference, vanilla)
    frame = Frame(len(runs[0].questions), resamples, seed)
    study = Study(runs, frame, prices=prices, all_runs=runs)
    fingerprints = list(dict.fromkeys(run.fingerprint for run in runs))
    tables: list[Table] = []
    lacking: dict[str, str] = {}
    for fingerprint in fingerprints:
        members = [run for run in runs if run.fingerprint == fingerprint]
        part = with_roles(replace(study, runs=members), reference, vanilla)
        ending = f" ({members[0].retriever} {fingerprint})" if len(fingerprints) > 1 else ""
        for name, analysis in ANALYSES.items():
            if only and name not in only:
                continue
            made = analysis(part)
            if isinstance(made, Table):
                made.title += ending
                tables.append(made)
            else:
                lacking[name + ending] = made
    if not only or RETRIEVERS in only:
        made = control(study)
        if isinstance(made, Table):
            tables.append(made)
        else:
            lacking[RETRIEVERS] = made
    frame.resolve()
    return tables, lacking


def _check(runs: Sequence[Run], only: Collection[str], reference: str | None, vanilla: str | None) -> None:
    unknown = sorted(set(only) - set(NAMES))
    if unknown:
        raise ValueError(f"unknown analysis {', '.join(unknown)}; known: {', '.join(NAMES)}")
    names = [run.name for run in runs]
    for role, name in (("reference", reference), ("vanilla", vanilla)):
        if name is not None and name not in names:
            raise ValueError(f"the {role} run {name} is none of the runs: {', '.join(names)}")
