"""The TAEC table of trained policies: the plain agent, each operator, ablations, and where the layer acts.

    python -m scripts.taec_table --policy seed0=PATH --policy seed1=PATH -o runs/taec
    python -m scripts.taec_table … --rows plain A M AM -- --limit 480 --temperature 1.0

Each row is a run of `rollout.evaluate` for each policy, which goes on where it stopped; what follows `--` is
for all of them. In the output folder, `taec.md` and `taec.json` are over all policies (each is a sample
of a question); `POLICY/compare.md` and `POLICY/compare.json` hold what `visor compare` says of each.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

from rollout.analyses.cost import calls
from rollout.analyses.frame import Frame
from rollout.analyses.prices import image_tokens, prompt_tokens
from rollout.analyses.study import Run
from rollout.analyses.table import Cell, Table
from rollout.compare import RESAMPLES, compare, load_results, render
from rollout.compare_folders import compare_runs, make_runs
from rollout.manifest import read_manifest
from rollout.recorder import read_lines
from rollout.results import ResultRow
from rollout.run_folder import TRAJECTORIES_NAME
from visor.types import Search, Trajectory

PLAIN = "plain"
TRACE = "--taec_config.exposure.trace '{query} not found .'"
"""In the words of the slide world's policy."""
AGAIN = "--taec_config.allocation.represent_pages 2 --taec_config.allocation.pressure_onset_tokens 100"
"""Earlier pages are shown again, and pressure begins at the length of the slide world's prompts: under the
window of 2 and its short prompts, V would change nothing."""
FULL = f"--taec AMV {TRACE} {AGAIN}"
ROWS = {
    PLAIN: "--taec off",
    "A": "--taec A",
    "M": f"--taec M {TRACE}",
    "V": "--taec V",
    "V_again": f"--taec V {AGAIN}",
    "AM": f"--taec AM {TRACE}",
    "AMV": FULL,
    "no_pressure": f"{FULL} --taec_config.allocation.pressure false",
    "no_detail": f"{FULL} --taec_config.allocation.detail false",
    "A_no_redundancy": "--taec A --taec_config.admission.eta 0",
    "A_open_slots": "--taec A --taec_config.admission.slot_weights open",
}
"""Row → options of `rollout.evaluate`."""


# ---------------------------------------------------------------- the runs


def evaluate_all(
    policies: Mapping[str, Path], rows: Sequence[str], output: Path, config: str, options: str, jobs: int
) -> dict[str, list[Path]]:
    """Run what is missing, `jobs` at a time; the run folders of each row, one a policy. SystemExit when a run
    fails."""
    folders = {row: [output / name / row for name in policies] for row in rows}
    commands = [
        f"python -m rollout.evaluate --config {config} --checkpoint {shlex.quote(str(checkpoint))}"
        f" {ROWS[row]} --output {shlex.quote(str(output / name / row))} {options}"
        for row in rows
        for name, checkpoint in policies.items()
    ]
    with ThreadPoolExecutor(jobs) as pool:
        failed = [command for command, ok in zip(commands, pool.map(_run, commands)) if not ok]
    if failed:
        raise SystemExit("failed; the same command goes on:\n" + "\n".join(failed))
    return folders


def _run(command: str) -> bool:
    print(command, flush=True)
    words = [sys.executable, *shlex.split(command)[1:]]
    done = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
    return done.returncode == 0


# ---------------------------------------------------------------- where the layer acts


@dataclass
class Acts:
    """How often the layer did something else than the plain agent, over the trajectories of a row."""

    trajectories: int = 0
    searches: int = 0
    overruled: int = 0
    """Searches that showed another page than the retriever's best unseen one."""
    gold_lost: int = 0
    """Of them: the page passed over was a gold page, the one shown is not."""
    gold_won: int = 0
    """Of them: the other way round."""
    traces: int = 0
    """Times that a piece of evidence became a trace."""
    sentences: int = 0
    """Times that one became one sentence."""
    smaller: int = 0
    """Pictures of earlier turns shown smaller than a fresh page."""

    def add(self, trajectory: Trajectory, gold: set[str]) -> None:
        self.trajectories += 1
        shown: list[str] = []
        for turn in trajectory.turns:
            pages = turn.observation.page_ids if turn.observation else []
            if isinstance(turn.action, Search) and pages:
                self.searches += 1
                best = next((page for page, _ in turn.candidates if page not in shown), None)
                self.overruled += best != pages[0]
                self.gold_lost += best != pages[0] and best in gold and pages[0] not in gold
                self.gold_won += best != pages[0] and best not in gold and pages[0] in gold
                shown += pages
        record = trajectory.meta.get("evidence_policy", {})
        for render_ in record.get("renders", []):
            self.traces += render_["role"] == "failed"
            self.sentences += render_["role"] == "resolved" or render_.get("shortened") == "one sentence"
        fresh = trajectory.meta.get("episode", {}).get("page_max_pixels", 0)
        for allocation in record.get("allocations", []):
            self.smaller += sum(picture["pixels"] < fresh for picture in allocation["pictures"])


def acts_of(folder: Path, rows: Sequence[ResultRow], acts: Acts) -> None:
    """Count the trajectories of a run folder that have one of the rows."""
    gold = {row.question_id: set(row.gold_page_ids) for row in rows}
    for record in read_lines(folder / TRAJECTORIES_NAME):
        if record["question_id"] in gold:
            acts.add(Trajectory.model_validate(record), gold[record["question_id"]])


# ---------------------------------------------------------------- the tables


def quality(runs: Sequence[Run], frame: Frame) -> Table:
    """Accuracy of each row with its paired difference, and what led to it."""
    plain = runs[0]
    rows: list[list[Cell]] = []
    for run in runs:
        later = run is not plain
        complete = run.measure(lambda row: row.complete)
        rows.append(
            [
                run.name,
                frame.n,
                frame.figure(run.accuracy()),
                frame.difference(plain.accuracy(), run.accuracy()) if later else None,
                frame.figure(run.measure(lambda row: row.hit)),
                frame.figure(complete),
                frame.difference(plain.measure(lambda row: row.complete), complete) if later else None,
                frame.figure(run.accuracy(lambda row: row.complete)),
                frame.figure(run.measure(lambda row: row.failed)),
            ]
        )
    header = (
        "row", "questions", "accuracy", "difference", "hit", "complete", "Δ complete",
        "accuracy when complete", "failed",
    )  # fmt: skip
    return Table("quality", "Accuracy", header, rows)


def context_cost(runs: Sequence[Run], frame: Frame) -> Table:
    """Means a question: searches, calls, tokens of all prompts and of their pictures, seconds."""
    plain = runs[0]
    rows: list[list[Cell]] = []
    for run in runs:
        change = None if run is plain else frame.difference(
            plain.measure(prompt_tokens), run.measure(prompt_tokens), "change"
        )  # fmt: skip
        rows.append(
            [
                run.name,
                frame.figure(run.measure(lambda row: row.searches), "number"),
                frame.figure(run.measure(calls), "number"),
                frame.figure(run.measure(prompt_tokens), "number"),
                change,
                frame.figure(run.measure(image_tokens), "number"),
                frame.figure(run.measure(lambda row: sum(row.context_images)), "number"),
                frame.figure(run.measure(lambda row: row.seconds.get("wall")), "number"),
            ]
        )
    header = (
        "row", "searches", "calls", "context tokens", "Δ context", "of them pictures", "pictures", "seconds",
    )  # fmt: skip
    note = "a local policy answers in batches, and each question counts the whole time of its batches"
    return Table("context", "Context cost, mean a question", header, rows, [note])


def where(acts: Mapping[str, Acts]) -> Table:
    """Counts over all trajectories of a row."""
    names = [field.name for field in fields(Acts)]
    rows: list[list[Cell]] = [[row, *(getattr(found, name) for name in names)] for row, found in acts.items()]
    return Table("acts", "Where the layer acts, in all", ("row", *(n.replace("_", " ") for n in names)), rows)


def make_tables(folders: Mapping[str, Sequence[Path]], resamples: int) -> tuple[list[Table], str]:
    """The tables over all policies, each a sample of its questions, and the exact tests as Markdown."""
    loaded = {row: [load_results(folder) for folder in members] for row, members in folders.items()}
    common = set.intersection(
        *({result.question_id for result in results} for runs in loaded.values() for results in runs)
    )
    pooled: dict[str, list[ResultRow]] = {}
    acts: dict[str, Acts] = {}
    for row, members in folders.items():
        pooled[row], acts[row] = [], Acts()
        for index, (folder, every) in enumerate(zip(members, loaded[row], strict=True)):
            results = [result for result in every if result.question_id in common]
            acts_of(folder, results, acts[row])
            pooled[row] += [result.model_copy(update={"sample_index": index}) for result in results]
    runs = make_runs(pooled, {row: read_manifest(members[0]) for row, members in folders.items()})
    frame = Frame(len(runs[0].questions), resamples)
    tables = [quality(runs, frame), context_cost(runs, frame), where(acts)]
    frame.resolve()
    return tables, render(compare(pooled, resamples), "markdown")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.taec_table", description=__doc__.split("\n")[0])
    parser.add_argument("--policy", action="append", required=True, metavar="NAME=CHECKPOINT")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--config", default="configs/study/evaluate.yaml", help="of rollout.evaluate")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--resamples", type=int, default=RESAMPLES)
    words = list(sys.argv[1:] if argv is None else argv)
    split = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:split])
    policies = dict(pair.partition("=")[::2] for pair in arguments.policy)
    if not all(policies.values()):
        parser.error("name each policy as NAME=CHECKPOINT")
    rows = [PLAIN, *(row for row in arguments.rows if row != PLAIN)]
    checkpoints = {name: Path(path) for name, path in policies.items()}
    options = shlex.join(words[split + 1 :])
    output = arguments.output
    folders = evaluate_all(checkpoints, rows, output, arguments.config, options, arguments.jobs)
    for index, name in enumerate(policies):
        compared = compare_runs([folders[row][index] for row in rows], arguments.resamples)
        (output / name / "compare.md").write_text(render(compared, "markdown") + "\n", encoding="utf-8")
        (output / name / "compare.json").write_text(render(compared, "json") + "\n", encoding="utf-8")
    tables, tests = make_tables(folders, arguments.resamples)
    text = "\n\n".join(table.render("markdown") for table in tables)
    (output / "taec.md").write_text(f"{text}\n\n### Paired tests\n\n{tests}\n", encoding="utf-8")
    record = json.dumps([table.record() for table in tables], ensure_ascii=False, indent=2)
    (output / "taec.json").write_text(record + "\n", encoding="utf-8")
    print("\n\n".join(table.render("text") for table in tables))


if __name__ == "__main__":
    main()
