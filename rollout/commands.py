"""The subcommands of `visor` that work on runs: their arguments, and functions that return the exit code.

`visor.cli` lists them. Libraries are imported inside the functions, so that `visor --help` is quick.
"""

from __future__ import annotations

import argparse
import sys

EXIT_OK, EXIT_FAILED = 0, 1


# ---------------------------------------------------------------- ask


def ask_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("corpus", metavar="CORPUS")
    parser.add_argument("question")
    parser.add_argument("--model", help="hf:PATH, vllm:PATH, openai:NAME@URL or script:FILE")
    parser.add_argument("--checkpoint", metavar="PATH", help="short for --model hf:PATH")
    parser.add_argument(
        "--index", metavar="PATH", help="index folder or http://HOST:PORT (default: CORPUS/index/RETRIEVER)"
    )
    parser.add_argument("--retriever", help="bm25, dense, colqwen or hybrid:FIRST+SECOND (default: bm25)")
    parser.add_argument("--system", help="visor, vanilla, react or dag (default: visor)")
    parser.add_argument("--taec", help="TAEC layer: on, off, or operators such as A (default: off)")
    parser.add_argument("--temperature", help="0 = greedy (default: 0.1)")
    parser.add_argument("--prompts", help="of visor: prompt set visor, tiny or a YAML file (default: visor)")
    parser.add_argument(
        "--config", metavar="PATH", help="YAML of settings, as python -m rollout.evaluate has"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any setting: --set episode.window=3"
    )
    parser.add_argument("--seed", type=int, default=0)


def run_ask(arguments: argparse.Namespace) -> int:
    from rollout.ask import ask
    from rollout.build import AgentConfig
    from rollout.evaluate import EvaluateConfig
    from visor.config import load_config

    given = {
        "corpus": arguments.corpus,
        "model": arguments.model,
        "checkpoint": arguments.checkpoint,
        "index": arguments.index,
        "retriever": arguments.retriever,
        "system": arguments.system,
        "taec": arguments.taec,
        "temperature": arguments.temperature,
        "episode.prompts": arguments.prompts,
    }
    overrides = [f"--{key}={value}" for key, value in given.items() if value is not None]
    overrides += [f"--{pair}" for pair in arguments.set]
    if arguments.config:
        # The file of an evaluation also names its judge, samples and the like, which one question has not.
        run = load_config(
            EvaluateConfig, arguments.config, ["--benchmark=unused", "--output=unused", *overrides]
        )
        config = AgentConfig(**{name: getattr(run, name) for name in AgentConfig.model_fields})
    else:
        config = load_config(AgentConfig, None, overrides)
    trajectory = ask(config, arguments.question, arguments.seed)
    return EXIT_FAILED if trajectory.answer is None else EXIT_OK


# ---------------------------------------------------------------- report, compare, judge, replay


def report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", help="folder of an evaluation or a GRPO run")
    parser.add_argument("-o", "--output", metavar="FILE", help="(default: RUN/report.html)")
    parser.add_argument("--corpus", metavar="CORPUS", help="for the pictures (default: the run's own)")
    parser.add_argument("--limit", type=int, default=12, help="trajectories shown (default: 12)")


def run_report(arguments: argparse.Namespace) -> int:
    from rollout.report import write_report

    print(write_report(arguments.folder, arguments.output, arguments.corpus, arguments.limit))
    return EXIT_OK


def explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", help="folder of an evaluation")
    parser.add_argument("--question", metavar="ID", help="(default: the first row)")
    parser.add_argument("--sample", type=int, help="(default: the first)")


def run_explain(arguments: argparse.Namespace) -> int:
    from rollout.explain import explain

    print(explain(arguments.folder, arguments.question, arguments.sample))
    return EXIT_OK


def compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="two or more run folders; the first is the baseline"
    )
    parser.add_argument(
        "--format", choices=["text", "markdown", "json"], default="text", help="on the terminal"
    )
    parser.add_argument("--markdown", metavar="FILE", help="write the tables there as well")
    parser.add_argument("--json", metavar="FILE", help="write all figures there as well")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="these analyses, such as depth cost"
    )
    parser.add_argument("--brief", action="store_true", help="differences alone, no analyses on the terminal")
    parser.add_argument(
        "--reference", metavar="RUN", help="whose searches tell how hard a question is (default: a react run)"
    )
    parser.add_argument("--vanilla", metavar="RUN", help="(default: a vanilla run)")
    parser.add_argument("--prices", metavar="FILE", help="YAML of prices per million tokens")
    parser.add_argument("--resamples", type=int, default=10_000, help="of the bootstrap (default: 10000)")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap")


def run_compare(arguments: argparse.Namespace) -> int:
    from dataclasses import replace
    from pathlib import Path

    from rollout.analyses.prices import read_prices
    from rollout.compare import render
    from rollout.compare_folders import compare_runs

    comparison = compare_runs(
        arguments.runs,
        arguments.resamples,
        arguments.seed,
        only=arguments.only,
        reference=arguments.reference,
        vanilla=arguments.vanilla,
        prices=read_prices(arguments.prices) if arguments.prices else None,
    )
    shown = replace(comparison, analyses=[], lacking={}) if arguments.brief else comparison
    print(render(shown, arguments.format))
    for style, name in (("markdown", arguments.markdown), ("json", arguments.json)):
        if name:
            Path(name).write_text(render(comparison, style) + "\n", encoding="utf-8")
    return EXIT_OK


def judge_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "The run itself is not changed: the verdicts stand in RUN/judgements, and the same command goes on "
        "where it stopped. exit status: 1 when none of the answers got a verdict"
    )
    parser.add_argument("folder", metavar="RUN")
    parser.add_argument(
        "--judge", required=True, help="rule, mmlongbench, slidevqa, hf:PATH, vllm:PATH or openai:NAME@URL"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a judge option: --set scale=5"
    )
    parser.add_argument("--format", choices=["text", "markdown"], default="text")


def run_judge(arguments: argparse.Namespace) -> int:
    from rollout.agreement import agreement_table, agreement_with_run
    from rollout.build import JudgeOptions, make_judge
    from rollout.judgements import judge_run, judgement_path
    from visor.config import load_config

    options = load_config(JudgeOptions, None, [f"--{pair}" for pair in arguments.set])
    judge = make_judge(arguments.judge, options=options)

    def show(done: int, total: int) -> None:
        if done % max(1, total // 10) == 0 or done == total:
            print(f"{done}/{total} answers judged", file=sys.stderr)

    judgements = judge_run(arguments.folder, judge, on_done=show)
    print(agreement_table(agreement_with_run(arguments.folder, judgements, judge.name), arguments.format))
    print(f"\n{judgement_path(arguments.folder, judge.name)}")
    failed = [entry for entry in judgements if entry.verdict is None]
    if failed:
        print(
            f"{len(failed)} of {len(judgements)} answers got no verdict; the same command asks for them again"
            f" (the first: {failed[0].error or 'no reason given'})",
            file=sys.stderr,
        )
    return EXIT_FAILED if failed and len(failed) == len(judgements) else EXIT_OK


def replay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN")
    parser.add_argument("--corpus", metavar="CORPUS", help="(default: the run's own)")
    parser.add_argument(
        "--index", metavar="PATH", help="(default: the run's own, or that of the corpus named by --corpus)"
    )
    parser.add_argument(
        "--recorded-retrieval",
        action="store_true",
        help="take the ranked pages from the record, not an index",
    )
    parser.add_argument(
        "--taec",
        metavar="LAYER",
        help="show what the layer (on, A, AM, …) would have done at each turn, and change nothing",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="with --taec, a setting of the layer: --set taec_config.admission.eta=1 (default: the run's)",
    )
    parser.add_argument("--question", metavar="ID", help="with --taec, trajectories of this question alone")
    parser.add_argument("--limit", type=int, metavar="N", help="with --taec, the first N trajectories")
    parser.add_argument("--json", action="store_true", help="JSON lines, one a difference or trajectory")


def run_replay(arguments: argparse.Namespace) -> int:
    """Exit code 1 when anything differs; with --taec 0, whatever the layer would have done."""
    if arguments.taec is not None:
        return _replay_layer(arguments)
    if arguments.set or arguments.question or arguments.limit is not None:
        raise ValueError("--set, --question and --limit go with --taec")
    from rollout.replay import replay_run

    count, differences = replay_run(
        arguments.folder, arguments.corpus, arguments.index, arguments.recorded_retrieval
    )
    for difference in differences:
        print(difference.model_dump_json() if arguments.json else difference)
    differing = len({difference.trajectory for difference in differences})
    print(f"{count} trajectories replayed, {differing} differ", file=sys.stderr)
    return EXIT_FAILED if differences else EXIT_OK


def _replay_layer(arguments: argparse.Namespace) -> int:
    from rollout.recorded_run import open_recorded, with_settings
    from rollout.replay_layer import LayerSummary, layer_text, replay_layer

    opened = open_recorded(arguments.folder, arguments.corpus, arguments.index, arguments.recorded_retrieval)
    summary = LayerSummary()
    layer = with_settings(opened.config, arguments.set)
    for replay in replay_layer(opened, arguments.taec, layer, arguments.question, arguments.limit):
        print(replay.model_dump_json() if arguments.json else layer_text(replay) + "\n")
        summary.add(replay)
    print(summary.text(), file=sys.stderr)
    return EXIT_OK


# ---------------------------------------------------------------- inspect-row


def inspect_row_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trajectories", metavar="RUN", help="run folder or trajectories file")
    parser.add_argument("--checkpoint", required=True, metavar="PATH", help="whose tokenizer makes the row")
    parser.add_argument("--corpus", required=True, metavar="CORPUS", help="for the sizes of the images")
    parser.add_argument("--question", metavar="ID", help="(default: the first)")
    parser.add_argument(
        "--sample", type=int, metavar="INDEX", help="sample of the question (default: the first)"
    )
    parser.add_argument(
        "--turn", type=int, metavar="N", help="row of turn N, from 1 (default: one row over the trajectory)"
    )


def run_inspect_row(arguments: argparse.Namespace) -> int:
    from rollout.inspect_row import inspect_row

    print(
        inspect_row(
            arguments.trajectories,
            arguments.checkpoint,
            arguments.corpus,
            arguments.question,
            arguments.sample,
            arguments.turn,
        )
    )
    return EXIT_OK
