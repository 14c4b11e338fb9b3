"""The study's tables, from its finished run folders.

Every figure is computed for each seed and then averaged; the range over seeds stands beside the mean unless
it is none. Intervals are those of `scripts.study_stats.PairedDifference`. `tables.json` holds the same with
the figure of each seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from data.corpus import Corpus
from data.questions import load_questions
from data.slide_world import read_slides
from rollout.manifest import read_manifest, write_json
from rollout.run_folder import METRICS_NAME
from scripts.slide_metrics import (
    HOPS,
    Episode,
    cause_counts,
    fact_figures,
    read_run,
    reading_figures,
    task_figures,
)
from scripts.study import ABLATED, ABLATIONS, POLICIES, SEEDS, TEMPERATURES
from scripts.study_curves import write_curves
from scripts.study_depth import DEPTHS, depth, depth_class, fixed_episodes
from scripts.study_stats import MEASURES, measured, paired_difference, seed_mean
from scripts.study_targets import target_table
from scripts.study_text import Table, as_json, render, replace_marked
from visor.retrieval.index import open_index

BySeed = dict[int, list[Episode]]
Runs = dict[str, BySeed]
"""`ROW-DECODING` → seed → episodes."""
Figures = Callable[[Sequence[Episode]], Mapping[str, float | None]]
FIXED = "always two searches"


def read_runs(study: Path) -> Runs:
    """The finished evaluations of a study, rows in the order of the plan."""
    slides = read_slides(study / "world" / "test" / "slides.jsonl")
    rows = [*POLICIES, *(f"{ABLATED}-{name}" for name in ABLATIONS)]
    runs: Runs = {}
    for name in (f"{row}-{decoding}" for row in rows for decoding in TEMPERATURES):
        for seed in SEEDS:
            folder = study / f"seed{seed}" / "evaluate" / name
            if (folder / METRICS_NAME).is_file():
                runs.setdefault(name, {})[seed] = read_run(folder, slides)
    return runs


def hop(runs: Runs, which: str) -> Runs:
    """The same with the questions of one kind only, without the runs that have none."""
    assert which in HOPS
    kept = {
        name: {seed: [e for e in episodes if e.hop == which] for seed, episodes in by_seed.items()}
        for name, by_seed in runs.items()
    }
    return {name: by_seed for name, by_seed in kept.items() if any(by_seed.values())}


def figure_table(
    name: str, caption: str, runs: Runs, figures: Figures, combine: Callable = seed_mean
) -> Table:
    """A row for each run; `combine` turns a figure's values by seed into a cell."""
    found = {run: {s: figures(episodes) for s, episodes in by_seed.items()} for run, by_seed in runs.items()}
    columns = list(
        dict.fromkeys(c for by_seed in found.values() for values in by_seed.values() for c in values)
    )
    rows = [
        (run, len(by_seed), *(combine({s: values[c] for s, values in by_seed.items()}) for c in columns))
        for run, by_seed in found.items()
    ]
    return Table(name, caption, ("policy", "seeds", *columns), rows)


def difference_table(name: str, caption: str, pairs: Sequence[tuple[str, BySeed, str, BySeed]]) -> Table:
    """A row for each (name, runs, name, runs): second minus first on every measure of MEASURES."""
    rows = []
    for name_1, first, name_2, second in pairs:
        cells = [
            paired_difference(measured(first, measure), measured(second, measure))
            for measure in MEASURES.values()
        ]
        rows.append((f"{name_2} − {name_1}", max(cell.questions for cell in cells), *cells))
    return Table(name, caption, ("second − first", "questions", *MEASURES), rows)


# ---------------------------------------------------------------- the tables


def task_tables(runs: Runs) -> list[Table]:
    """Table 1: the task, ablations apart."""
    single, multi = (_policies(runs, which) for which in HOPS)
    complete = "`accuracy, complete`: the answer is right and all gold pages were shown."
    return [
        figure_table("1. Single-hop", complete, single, task_figures),
        figure_table("1m. Multi-hop", complete, multi, task_figures),
    ]


def reading_tables(runs: Runs) -> list[Table]:
    """Table 4: pages read exactly, ablations apart."""
    exact = (
        "A page counts when the next reply was carried out and starts with the page in words; every reply"
        " that follows a shown page is in the denominator."
    )
    return [
        figure_table(
            f"4{mark}. Pages read exactly, {which}-hop", exact, _policies(runs, which), reading_figures
        )
        for mark, which in (("", "single"), ("m", "multi"))
    ]


def grpo_tables(runs: Runs) -> list[Table]:
    """Table 2: each GRPO policy against the policy it started from."""
    caption = (
        "Single-hop, paired by seed and question; 95 % bootstrap over questions, each drawn with its pairs of"
        " all seeds."
    )
    pairs = []
    for name, policy in POLICIES.items():
        for decoding in policy.decodings:
            first, second = f"{policy.start}-{decoding}", f"{name}-{decoding}"
            if policy.trainer == "grpo" and first in runs and second in runs:
                pairs.append((first, runs[first], second, runs[second]))
    return [difference_table("2. GRPO − SFT", caption, pairs)]


def depth_tables(runs: Runs, classes: Mapping[str, str], fixed: list[Episode]) -> list[Table]:
    """Table 3: by t*, SFT and GRPO against the fixed policy. `classes`: question id → class of DEPTHS."""
    shown = {k: v for k, v in runs.items() if k.rpartition("-")[0] in ("sft", ABLATED)}
    for by_seed in shown.values():
        for episodes in by_seed.values():
            assert all(episode.row.question_id in classes for episode in episodes)
    compared = shown | {FIXED: dict.fromkeys(SEEDS, fixed)}
    caption = (
        "Single-hop. t*: searches that show the gold page to a policy that repeats the question as its query."
        " The fixed policy searches twice whatever it finds and reads the truth of its pages: an upper bound."
    )
    tables = [
        figure_table(f"3. {name} by t*", caption, compared, _by_depth(MEASURES[name], classes))
        for name in ("Δ=1", "reward")
    ]
    against = [(FIXED, compared[FIXED], k, v) for k, v in shown.items()]
    kept = [column for column in MEASURES if column != "read exactly"]
    table = difference_table("3. Difference to the fixed policy", "As table 2.", against)
    places = [table.header.index(column) for column in ("second − first", "questions", *kept)]
    rows = [tuple(row[i] for i in places) for row in table.rows]
    return [*tables, Table(table.name, table.caption, tuple(table.header[i] for i in places), rows)]


def _by_depth(measure: Callable, classes: Mapping[str, str]) -> Figures:
    def figures(episodes: Sequence[Episode]) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        for name in (*DEPTHS, "all"):
            members = [e for e in episodes if name in ("all", classes[e.row.question_id])]
            if members or name != DEPTHS[-1]:
                found[f"n, t*={name}" if name != "all" else "n"] = len(members)
                found[f"t*={name}" if name != "all" else "all"] = _ratio(measure, members)
        return found

    return figures


def fact_tables(runs: Runs) -> list[Table]:
    """Table 5: what is said of the asked fact, and where wrong answers come from."""
    runs = _policies(runs, "single")
    caption = "Single-hop; shares of the replies to pages of this kind."
    kinds = ("pages without the fact", "gold pages", "pages after the gold page")
    tables = [
        figure_table(
            f"5. Said of the fact: {kind}", caption, runs, lambda e, kind=kind: fact_figures(e)[kind]
        )
        for kind in kinds
    ]
    caption = (
        "Single-hop episodes without a right answer after complete retrieval, all seeds together, by cause."
    )
    return [*tables, figure_table("5. Causes of errors", caption, runs, cause_counts, _total)]


def ablation_tables(runs: Runs) -> list[Table]:
    """Table 6: parts of the episode taken away, and window sizes, at evaluation only."""
    single = hop(runs, "single")
    tables = []
    for decoding in TEMPERATURES:
        full = f"{ABLATED}-{decoding}"
        rows = {f"{ABLATED}-{name}-{decoding}": name for name in ABLATIONS}
        found = {"full (window 2)": single[full]} if full in single else {}
        found |= {rows[name]: by_seed for name, by_seed in single.items() if name in rows}
        if len(found) < 2:
            continue
        caption = f"Single-hop, {decoding}; `{ABLATED}` as trained, evaluated with another episode."
        tables.append(figure_table(f"6. Ablations, {decoding}", caption, found, _ablation_figures))
        pairs = [(full, single[full], name, by_seed) for name, by_seed in found.items()][1:]
        tables.append(difference_table(f"6. Ablation − full, {decoding}", "As table 2.", pairs))
    return tables


def _ablation_figures(episodes: Sequence[Episode]) -> dict[str, float | None]:
    task = task_figures(episodes)
    names = ("accuracy, complete", "accuracy", "completeness", "Δ=1", "reward", "invalid actions", "searches")
    images = [count for episode in episodes for count in episode.row.context_images]
    tokens = [count for episode in episodes for count in episode.prompt_tokens]
    return {name: task[name] for name in names} | {
        "read exactly": _ratio(MEASURES["read exactly"], episodes),
        "images a call": sum(images) / len(images) if images else None,
        "prompt tokens a call": sum(tokens) / len(tokens) if tokens else None,
    }


def _policies(runs: Runs, which: str) -> Runs:
    """The runs of whole policies on one kind of question; ablations have a table of their own."""
    return {
        name: by_seed for name, by_seed in hop(runs, which).items() if name.rpartition("-")[0] in POLICIES
    }


def _ratio(measure: Callable, episodes: Sequence[Episode]) -> float | None:
    pairs = [measure(episode) for episode in episodes]
    below = sum(pair[1] for pair in pairs)
    return sum(pair[0] for pair in pairs) / below if below else None


def _total(by_seed: Mapping[int, float | None]) -> int:
    return sum(int(value or 0) for value in by_seed.values())


def chosen_table(study: Path) -> Table:
    """Table 7: the step whose model validation chose, for each seed of each GRPO policy that validated."""
    rows = []
    for name, policy in POLICIES.items():
        for seed in policy.seeds:
            record = study / f"seed{seed}" / "policy" / name / "best" / "best.json"
            if policy.trainer == "grpo" and record.is_file():
                best = json.loads(record.read_text(encoding="utf-8"))
                rows.append((name, seed, best["step"], best["metric"], float(best["value"])))
    caption = "On pages of the validation split, which are neither trained on nor tested on."
    return Table("7. Chosen checkpoints", caption, ("policy", "seed", "step", "figure", "value"), rows)


# ---------------------------------------------------------------- output


def all_tables(study: Path) -> list[Table]:
    """ValueError when no evaluation is finished."""
    runs = read_runs(study)
    if not runs:
        raise ValueError(f"{study} holds no finished evaluation yet")
    single = hop(runs, "single")
    questions = {
        q.question_id: q for q in load_questions(f"questions:{study / 'world' / 'test' / 'single_hop.jsonl'}")
    }
    corpus = study / "corpus" / "test"
    retriever = open_index(corpus / "index" / "bm25", Corpus.open(corpus))
    classes = {name: depth_class(depth(question, retriever)) for name, question in questions.items()}
    asked = {e.row.question_id for by_seed in single.values() for run in by_seed.values() for e in run}
    tables = [*task_tables(runs), *grpo_tables(single)]
    fixed = study / "fixed" / "trajectories.jsonl"
    if fixed.is_file():
        tables += depth_tables(single, classes, fixed_episodes(fixed, questions, asked))
    tables += [*reading_tables(runs), *fact_tables(runs), *ablation_tables(runs), chosen_table(study)]
    return [target_table(tables), *(table for table in tables if table.rows)]


def write_tables(study: Path, into: Path | None = None) -> None:
    """Write `tables.md`, `tables.json` and `curves/`, and print the tables; `into`: a Markdown document whose
    part between two markers they replace."""
    tables = all_tables(study)
    text = "\n\n".join([*(render(table) for table in tables), provenance(study)]) + "\n"
    (study / "tables.md").write_text(text, encoding="utf-8")
    if into:
        into.write_text(replace_marked(into.read_text(encoding="utf-8"), text), encoding="utf-8")
    write_json(study / "tables.json", {table.name: as_json(table) for table in tables})
    pictures = write_curves(study, {k: p.seeds for k, p in POLICIES.items() if p.trainer == "grpo"})
    print(text)
    for path in (study / "tables.md", study / "tables.json", *pictures):
        print(path)


def provenance(study: Path) -> str:
    """One sentence on the code of the runs: results of several versions of it are named as such."""
    manifests = [read_manifest(path.parent) for path in sorted(study.glob("seed*/evaluate/*/manifest.json"))]
    codes = sorted({manifest.code_fingerprint[:12] for manifest in manifests})
    commits = sorted(
        {m.git_commit[:9] + "+" * bool(m.git_dirty) if m.git_commit else "none" for m in manifests}
    )
    return (
        f"{len(manifests)} run folders; code {', '.join(codes)}; commits {', '.join(commits)}"
        " (+ = with uncommitted changes)."
    )
