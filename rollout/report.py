"""One self-contained HTML page about a run: figures, curves, trajectories with their pages."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rollout.compare import RESULTS_NAME, load_results
from rollout.curves import plot_curves
from rollout.manifest import MANIFEST_NAME, RunManifest, read_manifest
from rollout.metrics import summarise
from rollout.pictures import Pictures
from rollout.recorder import read_lines
from rollout.report_html import document, escape, metric_tables, table, tiles, trajectory_card
from rollout.results import ResultRow, result_row
from rollout.run_folder import TRAJECTORIES_NAME
from visor.types import PageStore, Question, Trajectory

CURVES_NAME = "metrics.jsonl"
DEFAULT_LIMIT = 12


def write_report(
    run: str | Path,
    out: str | Path | None = None,
    corpus: str | Path | None = None,
    limit: int = DEFAULT_LIMIT,
) -> Path:
    """Write the report of an evaluation run, or of a GRPO run (its curves and last rollouts).

    `out` is `RUN/report.html` unless given. `corpus` defaults to the one of the manifest; without a corpus
    the page has no pictures and says so. ValueError when the folder is no run or the given corpus none.
    """
    run = Path(run)
    manifest = read_manifest(run) if (run / MANIFEST_NAME).is_file() else None
    rows, trajectories = _load(run)
    pictures = Pictures(_open_corpus(corpus, manifest))
    chosen = choose(rows, limit)
    cards = _cards(chosen, trajectories, pictures)
    body = [
        *_heading(run, manifest),
        tiles(metrics := summarise(rows)),
        metric_tables(metrics),
        *_curves(run),
        f"<h2>Trajectories</h2><p class='note'>{len(cards)} of {len(rows)}, wrong, right and failed ones in "
        f"turn. Gold pages are framed in green.{escape(_picture_note(pictures))}</p>",
        *cards,
        *_made_with(manifest),
    ]
    out = Path(out) if out else run / "report.html"
    # A lone surrogate in a reply has no UTF-8 form; it is shown as "?" rather than ending the report.
    out.write_bytes(document(f"Run {run.resolve().name}", body).encode("utf-8", "replace"))
    return out


def choose(rows: Sequence[ResultRow], limit: int) -> list[ResultRow]:
    """Up to `limit` rows: wrong, right, failed and unjudged ones in turn, each kind in file order."""
    kinds: dict[str, list[ResultRow]] = {"wrong": [], "right": [], "failed": [], "unjudged": []}
    for row in rows:
        kind = "failed" if row.failed else "unjudged" if row.unjudged else "right" if row.correct else "wrong"
        kinds[kind].append(row)
    chosen: list[ResultRow] = []
    for position in range(max(map(len, kinds.values()), default=0)):
        chosen += [members[position] for members in kinds.values() if position < len(members)]
    return chosen[:limit]


def _load(run: Path) -> tuple[list[ResultRow], Iterator[dict]]:
    """Result rows and a stream of trajectory records."""
    if (run / RESULTS_NAME).is_file():
        return load_results(run), read_lines(run / TRAJECTORIES_NAME)
    steps = sorted((run / "rollouts").glob("step-*.jsonl"), key=lambda path: int(path.stem.split("-")[1]))
    if not steps:
        raise ValueError(f"{run} is no run folder: neither {RESULTS_NAME} nor rollouts/step-*.jsonl is there")
    trajectories = [Trajectory.model_validate(record) for record in read_lines(steps[-1])]
    # A training run keeps no question records: its report has no gold answers.
    rows = [result_row(t, Question(question_id=t.question_id, text=t.question)) for t in trajectories]
    return rows, read_lines(steps[-1])


def _cards(chosen: Sequence[ResultRow], records: Iterator[dict], pictures: Pictures) -> list[str]:
    """Cards in the order of `chosen`; only those trajectories are kept while the file is read."""
    wanted = {(row.question_id, row.sample_index): row for row in chosen}
    found = {}
    for record in records:
        key = (record["question_id"], record["sample_index"])
        if key in wanted:
            found[key] = Trajectory.model_validate(record)
    return [
        trajectory_card(found[key], row, pictures, opened=not position)
        for position, (key, row) in enumerate(wanted.items())
        if key in found
    ]


def _open_corpus(given: str | Path | None, manifest: RunManifest | None) -> PageStore | None:
    """The given corpus, or the run's own if it is still there; ValueError when the given one is none."""
    path = given or (manifest.corpus.get("path") if manifest else None)
    if path is None or (not given and not Path(path).is_dir()):
        return None
    from data.corpus import Corpus

    return Corpus.open(Path(path))


def _picture_note(pictures: Pictures) -> str:
    if pictures.store is None:
        return " The corpus was not found: name it with --corpus to see the pages."
    return f" {len(pictures.missing)} pages are not in the corpus." if pictures.missing else ""


def _heading(run: Path, manifest: RunManifest | None) -> list[str]:
    heading = f"<h1>{escape(run.resolve().name)}</h1>"
    if manifest is None:
        return [heading]
    model = manifest.model.get("name") or manifest.model.get("path", "")
    lead = f"{manifest.system} · {model} · judge {manifest.judge} · {manifest.created}"
    return [heading, f'<p class="lead">{escape(lead)}</p>']


def _made_with(manifest: RunManifest | None) -> list[str]:
    if manifest is None:
        return []
    fields = manifest.model_dump(mode="json", exclude={"arguments", "schema_version"})
    return ["<h2>Made with</h2>", table(("field", "value"), [(k, v) for k, v in fields.items() if v])]


def _curves(run: Path) -> list[str]:
    if not (run / CURVES_NAME).is_file():
        return []
    with tempfile.TemporaryDirectory() as folder:
        png = plot_curves(run / CURVES_NAME, Path(folder) / "curves.png").read_bytes()
    picture = "data:image/png;base64," + base64.b64encode(png).decode()
    return ["<h2>Training</h2>", f'<img class="curves" src="{picture}" alt="training curves">']
