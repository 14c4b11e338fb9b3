"""`visor compare`: run folders in, the comparison with all its analyses out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from rollout.analyses.prices import Prices
from rollout.analyses.registry import analyse
from rollout.analyses.study import Run
from rollout.call_tokens import slot_calls, token_fields
from rollout.compare import RESAMPLES, Comparison, by_question, compare, load_results
from rollout.manifest import RunManifest, read_manifest
from rollout.recorder import read_lines, sample_key
from rollout.results import ResultRow, completed_searches, first_retrieved
from rollout.run_folder import TRAJECTORIES_NAME
from visor.types import Trajectory

SHARED = {
    "judge": lambda m: m.judge,
    "retriever fingerprint": lambda m: m.index.get("retriever_fingerprint"),
    "corpus": lambda m: m.corpus.get("hash"),
    "question set": lambda m: m.questions.get("hash"),
}
"""What the runs of a table should have in common, and where a manifest says it."""


def compare_runs(
    folders: Sequence[str | Path],
    resamples: int = RESAMPLES,
    seed: int = 0,
    *,
    only: Collection[str] = (),
    reference: str | Path | None = None,
    vanilla: str | Path | None = None,
    prices: Prices | None = None,
) -> Comparison:
    """`compare` for run folders, with the analyses of `only` (all of them where it is empty).

    `reference`, `vanilla`: folders among the runs that play these parts; None = by system. Notes name what
    the manifests do not share and should. ValueError for a folder without results.
    """
    names = _short_names([Path(folder) for folder in folders])
    rows = {name: load_rows(folder) for name, folder in zip(names, folders, strict=True)}
    manifests = {name: read_manifest(folder) for name, folder in zip(names, folders, strict=True)}
    comparison = compare(rows, resamples, seed)
    comparison.notes += _manifest_notes(manifests)
    comparison.analyses, comparison.lacking = analyse(
        make_runs(rows, manifests),
        resamples,
        seed,
        only=only,
        reference=_name_of(reference, folders, names),
        vanilla=_name_of(vanilla, folders, names),
        prices=prices,
    )
    return comparison


def load_rows(folder: str | Path) -> list[ResultRow]:
    """The rows of a run; those made before a field was kept are completed from the trajectories beside
    them."""
    rows = load_results(folder)
    path = Path(folder) / TRAJECTORIES_NAME
    if all(row.first_retrieved is not None for row in rows) or not path.is_file():
        return rows
    later = {}
    for record in read_lines(path):
        trajectory = Trajectory.model_validate(record)
        later[sample_key(record)] = {
            "first_retrieved": first_retrieved(trajectory),
            "completed_searches": completed_searches(trajectory),
            "slot_calls": slot_calls(trajectory),
            **token_fields(trajectory),
        }
    return [row.model_copy(update=later.get((row.question_id, row.sample_index), {})) for row in rows]


def make_runs(rows: Mapping[str, Sequence[ResultRow]], manifests: Mapping[str, RunManifest]) -> list[Run]:
    """The runs over the questions that all of them have, in the order of the first run."""
    questions = {name: by_question(members) for name, members in rows.items()}
    common = set.intersection(*(set(members) for members in questions.values()))
    order = [question for question in next(iter(questions.values())) if question in common]
    return [
        Run(
            name=name,
            questions=[sorted(members[q], key=lambda row: row.sample_index) for q in order],
            **_made_with(manifests[name]),
        )
        for name, members in questions.items()
    ]


def _made_with(manifest: RunManifest) -> dict:
    model = manifest.model
    return {
        "system": manifest.system,
        "operators": manifest.taec.get("operators") or "",
        "model": model.get("name") or Path(model.get("path", "")).name,
        "retriever": manifest.index.get("retriever") or "",
        "fingerprint": manifest.index.get("retriever_fingerprint") or "",
        "judge": manifest.judge,
        "pressure_tokens": manifest.intervention.get("pressure_tokens", 0),
        "frozen": manifest.intervention.get("frozen", {}).get("searches", ""),
        "settings": manifest.episode,
    }


def _short_names(folders: Sequence[Path]) -> list[str]:
    """Folder names, or whole paths where names collide."""
    names = [folder.resolve().name for folder in folders]
    names = names if len(set(names)) == len(names) else [str(folder) for folder in folders]
    if len(set(names)) < len(names):
        raise ValueError("a run is given twice; name different folders")
    return names


def _name_of(folder: str | Path | None, folders: Sequence[str | Path], names: Sequence[str]) -> str | None:
    """The short name of a folder that may also be given by that name."""
    if folder is None:
        return None
    for other, name in zip(folders, names, strict=True):
        if str(folder) == name or Path(folder).resolve() == Path(other).resolve():
            return name
    return str(folder)


def _manifest_notes(manifests: Mapping[str, RunManifest]) -> list[str]:
    notes = []
    for what, value in SHARED.items():
        values = {name: value(manifest) for name, manifest in manifests.items()}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{name} {value}" for name, value in values.items())
            notes.append(f"the runs differ in their {what}: {listed}")
    return notes
