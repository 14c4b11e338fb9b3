"""The study of the tiny policy: SFT, GRPO under several settings, ablations, three seeds, in the slide world.

    python -m scripts.study            run what is missing, two commands at a time, then write the tables
    python -m scripts.study tables     the tables of what is finished, as Markdown and JSON, and the curves
    python -m scripts.study list       every stage and its state

Every stage is one of the project's own commands; the three tables below say which. A finished stage leaves a
mark; changing a configuration file or an option runs the stages again that depend on it, and no others.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data.slide_world import SPLITS
from rollout.fingerprints import code_fingerprint
from scripts.stage_graph import digests, run_graph, select, state
from scripts.stages import LAUNCH, Stage

ROOT = Path(__file__).parents[1]
STUDY = Path("runs/study")
CONFIGS = Path("configs/study")
SEEDS = (0, 1, 2)
WARM_START = Path("data/slide_policy")
TEMPERATURES = {"sampled": 1.0, "greedy": 0.0}
FIXED_SEARCHES = 2


@dataclass(frozen=True)
class Expert:
    """A teacher's filtered trajectories, `expert/NAME.jsonl`."""

    hop: Literal["single", "multi"]
    options: str = ""
    """Of `data.slide_expert`."""
    filter: str = ""
    """More options of `sft.filter`."""


@dataclass(frozen=True)
class Policy:
    """A policy to train and to evaluate, one a seed."""

    trainer: Literal["sft", "grpo"]
    config: str
    """File of `configs/study`."""
    start: str = ""
    """Name of the policy of the same seed that it starts from; "" = the shipped warm start."""
    options: str = ""
    """Over the file."""
    seeds: tuple[int, ...] = SEEDS
    decodings: tuple[str, ...] = tuple(TEMPERATURES)


EXPERTS = {
    "single": Expert("single"),
    "confirm": Expert("single", "--extra_searches 0 0.7 0.2 0.1 --seed 1", "--max_extra_searches 3"),
    "multi": Expert("multi"),
    "noisy": Expert("single", "--noise 0.4 --seed 2", "--keep_invalid_actions"),
}


LESSONS = {"look": ("look", "train"), "read": ("read", "train"), "look_rl": ("look", "rl")}
"""File → lesson of `data.slide_lessons`, split."""

POLICIES = {
    "sft": Policy("sft", "sft.yaml"),
    "grpo": Policy("grpo", "grpo.yaml", "sft"),
    "grpo_kl": Policy("grpo", "grpo.yaml", "sft", "--auxiliary null"),
    "grpo_paper": Policy(
        "grpo",
        "grpo.yaml",
        "sft",
        "--auxiliary null --credit trajectory --beta 0.01 --per_device_train_batch_size 10",
        decodings=("sampled",),
    ),
    "grpo_trajectory": Policy(
        "grpo", "grpo.yaml", "sft", "--credit trajectory --per_device_train_batch_size 10"
    ),
    "grpo_aux_off": Policy(
        "grpo", "grpo.yaml", "sft", "--auxiliary.until_step 60", seeds=(0,), decodings=("sampled",)
    ),
    "sft_noisy": Policy("sft", "sft_noisy.yaml", "sft", seeds=(0,), decodings=("sampled",)),
    "grpo_noisy": Policy("grpo", "grpo.yaml", "sft_noisy", seeds=(0,), decodings=("sampled",)),
    "sft_episode": Policy("sft", "sft_context.yaml", options="--context episode", seeds=(0,)),
    "sft_append": Policy("sft", "sft_context.yaml", options="--context append", seeds=(0,)),
}

ABLATED = "grpo"
"""The policy of the ablations; its own rows, `grpo-sampled` and `grpo-greedy`, are the full setting."""
ABLATION_DECODINGS = ("sampled",)
NO_EVIDENCE, NO_WINDOW, NO_INTENT = (
    "--episode.evidence_space false",
    "--episode.window null",
    "--episode.intent_injection false",
)
ABLATIONS = {
    "no_evidence": NO_EVIDENCE,
    "no_window": NO_WINDOW,
    "no_intent": NO_INTENT,
    "none": f"{NO_EVIDENCE} {NO_WINDOW} {NO_INTENT}",
    "window1": "--episode.window 1",
    "window3": "--episode.window 3",
    "window4": "--episode.window 4",
}
"""Row → options of `rollout.evaluate`; window 2 is the full setting."""


def stages() -> list[Stage]:
    """Every stage of the study, each after those that it needs; all of a seed before the next one."""
    return [*shared_stages(), *(stage for seed in SEEDS for stage in seed_stages(seed))]


def shared_stages() -> Iterator[Stage]:
    """The world, its corpora, the teachers' trajectories and lessons, and the fixed policy."""
    yield Stage("world", "corpus", (f"python -m data.slide_world -o {STUDY}/world",), ("world",))
    for split in SPLITS:
        corpus = f"{STUDY}/corpus/{split}"
        ingest = f"visor ingest {STUDY}/world/{split}/documents -o {corpus}"
        commands = (ingest, f"visor index {corpus} --retriever bm25")
        yield Stage(f"corpus/{split}", "corpus", commands, (f"corpus/{split}",), after=("world",))
    for name, (lesson, split) in LESSONS.items():
        output = f"lessons/{name}.jsonl"
        command = f"python -m data.slide_lessons {lesson} --split {STUDY}/world/{split} -o {STUDY}/{output}"
        yield Stage(f"lessons/{name}", "corpus", (command,), (output,), after=("world",))
    for name, expert in EXPERTS.items():
        yield expert_stage(name, expert)
    output = "fixed/trajectories.jsonl"
    command = teacher_command("test", "single", output, f"--always_searches {FIXED_SEARCHES}")
    yield Stage("fixed", "evaluate", (command,), ("fixed",), after=("corpus/test",))


def expert_stage(name: str, expert: Expert) -> Stage:
    raw, kept = f"expert/{name}_unfiltered.jsonl", f"expert/{name}.jsonl"
    questions = f"questions:{STUDY}/world/train/{expert.hop}_hop.jsonl"
    commands = (
        teacher_command("train", expert.hop, raw, expert.options),
        f"python -m sft.filter {STUDY}/{raw} --questions {questions} --max_extra_searches 2"
        f" --max_uninformative_searches 10 -o {STUDY}/{kept} {expert.filter}".rstrip(),
    )
    return Stage(f"expert/{name}", "corpus", commands, (raw, kept), after=("corpus/train",))


def teacher_command(split: str, hop: str, output: str, options: str) -> str:
    world = f"{STUDY}/world/{split}"
    return (
        f"python -m data.slide_expert --questions questions:{world}/{hop}_hop.jsonl"
        f" --slides {world}/slides.jsonl --corpus {STUDY}/corpus/{split} -o {STUDY}/{output} {options}"
    ).rstrip()


def seed_stages(seed: int) -> Iterator[Stage]:
    """Training, then evaluation, of each policy of a seed; ablations last."""
    policies = {name: policy for name, policy in POLICIES.items() if seed in policy.seeds}
    for name, policy in policies.items():
        yield training_stage(seed, name, policy)
        for decoding in policy.decodings:
            yield evaluation_stage(seed, name, name, decoding)
    for row, options in ABLATIONS.items():
        for decoding in ABLATION_DECODINGS:
            yield evaluation_stage(seed, ABLATED, f"{ABLATED}-{row}", decoding, options)


def training_stage(seed: int, name: str, policy: Policy) -> Stage:
    output = f"seed{seed}/policy/{name}"
    start = f"{STUDY}/seed{seed}/policy/{policy.start}" if policy.start else str(WARM_START)
    command = f"{LAUNCH} sft" if policy.trainer == "sft" else "python -m grpo.train"
    command = (
        f"{command} --config {CONFIGS / policy.config} --model_name_or_path {start}"
        f" --output_dir {STUDY}/{output} --seed {seed} --torch_threads 1 {policy.options}"
    ).rstrip()
    needed = [f"seed{seed}/policy/{policy.start}"] if policy.start else []
    needed += ["corpus/train"] if policy.trainer == "sft" else ["corpus/rl", "corpus/validation"]
    needed += data_stages((CONFIGS / policy.config).read_text(encoding="utf-8") + policy.options)
    return Stage(output, policy.trainer, (command,), (output,), after=tuple(dict.fromkeys(needed)))


def data_stages(text: str) -> list[str]:
    """The stages that write the trajectories and lessons named in a configuration."""
    return [f"{kind}/{name}" for kind, name in re.findall(rf"{STUDY}/(expert|lessons)/(\w+)\.jsonl", text)]


def evaluation_stage(seed: int, policy: str, row: str, decoding: str, options: str = "") -> Stage:
    output = f"seed{seed}/evaluate/{row}-{decoding}"
    command = (
        f"python -m rollout.evaluate --config {CONFIGS}/evaluate.yaml"
        f" --checkpoint {STUDY}/seed{seed}/policy/{policy} --seed {seed}"
        f" --temperature {TEMPERATURES[decoding]} --torch_threads 1 --output {STUDY}/{output} {options}"
    ).rstrip()
    return Stage(
        output, "evaluate", (command,), (output,), after=(f"seed{seed}/policy/{policy}", "corpus/test")
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.study", description=__doc__.split("\n")[0])
    parser.add_argument("action", nargs="?", choices=("run", "tables", "list"), default="run")
    parser.add_argument(
        "--only", nargs="+", default=["*"], metavar="PATTERN", help="stages, such as 'seed0/policy/grpo*'"
    )
    parser.add_argument("--jobs", type=int, default=2, help="commands at a time (default %(default)s)")
    parser.add_argument(
        "--same_code",
        action="store_true",
        help="run again what was made with other code than the present one",
    )
    parser.add_argument(
        "--into", type=Path, help="a document whose marked part the tables replace, such as docs/study.md"
    )
    arguments = parser.parse_args(argv)
    os.chdir(ROOT)
    try:
        chosen = select(stages(), arguments.only)
    except ValueError as error:
        parser.error(str(error))
    code = code_fingerprint()
    if arguments.action == "list":
        found = digests(stages())
        print("\n".join(f"{state(s, STUDY, found[s.name], code):<18} {s.name}" for s in chosen))
        return
    if arguments.action == "run":
        run_graph(chosen, STUDY, code, arguments.jobs, arguments.same_code)
    from scripts.study_tables import write_tables

    write_tables(STUDY, arguments.into)


if __name__ == "__main__":
    main()
