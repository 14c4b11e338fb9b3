"""`make demo`: the main job from nothing to a table, on the built-in slide world and two CPU cores.

Every stage is one or more of the project's own commands, printed before it runs, so that each can be copied.
A finished stage leaves a mark; run again after an interruption, the demo goes on after the last mark. A mark
holds only for the same commands, the same configuration files and the same code.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from data.slide_world import SPLITS
from rollout.fingerprints import code_fingerprint
from scripts.demo_summary import write_summary
from scripts.stages import LAUNCH, Stage, run_stage, stage_digest

ROOT = Path(__file__).parents[1]
DEMO = Path("runs/demo")
WARM_START = Path("data/slide_policy")
"""The policy after the two warm-ups, shipped; `--full` trains it anew."""
EVALUATED = ("base", "sft", "grpo", "grpo_taec")
"""Rows of the table."""
TEMPERATURES = {"sampled": "1.0", "greedy": "0.0"}


def stages(full: bool = False) -> list[Stage]:
    """All stages in order. `full`: train the warm start too, from random weights."""
    base = DEMO / "policy" / "base" if full else WARM_START
    policies = {row: DEMO / "policy" / row.removesuffix("_taec") for row in EVALUATED} | {"base": base}
    lessons = tuple(
        f"python -m data.slide_lessons {lesson} --split {DEMO}/world/{split} -o {DEMO}/lessons/{name}.jsonl"
        for name, (lesson, split) in LESSONS.items()
    )
    return [
        Stage("world", "corpus", (f"python -m data.slide_world -o {DEMO}/world",), ("world",)),
        Stage(
            "ingest",
            "corpus",
            tuple(
                command
                for split in SPLITS
                for command in (
                    f"visor ingest {DEMO}/world/{split}/documents -o {DEMO}/corpus/{split}",
                    f"visor index {DEMO}/corpus/{split} --retriever bm25",
                )
            ),
            ("corpus",),
        ),
        Stage(
            "lessons",
            "sft",
            (*lessons, *expert_commands()),
            (*(f"lessons/{name}.jsonl" for name in LESSONS), "expert"),
        ),
        *(warm_up_stages() if full else []),
        Stage(
            "sft",
            "sft",
            (f"{LAUNCH} sft --config configs/demo/sft.yaml --model_name_or_path {base}",),
            ("policy/sft",),
        ),
        Stage("grpo", "grpo", ("python -m grpo.train --config configs/demo/grpo.yaml",), ("policy/grpo",)),
        Stage(
            "evaluate",
            "evaluate",
            tuple(
                f"python -m rollout.evaluate --config configs/demo/evaluate.yaml"
                f" --checkpoint {policies[row]} --taec {'on' if 'taec' in row else 'off'}"
                f" --temperature {temperature} --output {DEMO}/evaluate/{row}-{decoding}"
                for row in EVALUATED
                for decoding, temperature in TEMPERATURES.items()
            ),
            ("evaluate",),
            parallel=2,
        ),
        Stage(
            "report",
            "report",
            (
                f"visor compare {DEMO}/evaluate/sft-sampled {DEMO}/evaluate/grpo-sampled",
                f"python -m rollout.curves {DEMO}/policy/grpo/metrics.jsonl {DEMO}/curves.png",
                f"visor report {DEMO}/evaluate/grpo-sampled --limit 6 -o {DEMO}/report.html",
            ),
            ("curves.png", "report.html"),
        ),
    ]


LESSONS = {"look": ("look", "train"), "read": ("read", "train"), "look_rl": ("look", "rl")}
"""File → lesson of `data.slide_lessons`, split."""
EXPERTS = {
    "single": ("single", "", 2),
    "confirm": ("single", "--extra_searches 0 0.7 0.2 0.1 --seed 1", 3),
    "multi": ("multi", "", 2),
}
"""File → (kind of question, options of the expert, most searches after the last gold page). Of `confirm` SFT
learns the last reply only: how to answer after a confirming search, not when to make one."""


def expert_commands() -> Iterator[str]:
    """Write each expert's trajectories, and keep the good ones."""
    for name, (hop, options, extra) in EXPERTS.items():
        questions = f"questions:{DEMO}/world/train/{hop}_hop.jsonl"
        yield (
            f"python -m data.slide_expert --questions {questions} --slides {DEMO}/world/train/slides.jsonl"
            f" --corpus {DEMO}/corpus/train -o {DEMO}/expert/{name}.jsonl {options}"
        ).rstrip()
        yield (
            f"python -m sft.filter {DEMO}/expert/{name}.jsonl --questions {questions}"
            f" --max_extra_searches {extra} --max_uninformative_searches 10"
            f" -o {DEMO}/expert/{name}_filtered.jsonl"
        )


def warm_up_stages() -> list[Stage]:
    """From random weights to a policy that looks facts up and reads pages."""
    return [
        Stage(
            "random",
            "sft",
            (
                f"python -m data.slide_lessons vocabulary -o {DEMO}/lessons/vocabulary.txt",
                f"python -m visor.models.tiny {DEMO}/lessons/vocabulary.txt -o {DEMO}/policy/random",
                f"python -m data.slide_lessons text -o {DEMO}/lessons/text.jsonl",
            ),
            ("lessons/vocabulary.txt", "policy/random", "lessons/text.jsonl"),
        ),
        *(
            Stage(name, "sft", (f"{LAUNCH} sft --config configs/demo/{name}.yaml",), (f"policy/{output}",))
            for name, output in (("warmup_text", "text"), ("warmup_read", "base"))
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.demo", description=__doc__.split("\n")[0])
    parser.add_argument("--full", action="store_true", help="train the warm start too, from random weights")
    parser.add_argument(
        "--until", choices=[stage.name for stage in stages(full=True)], help="last stage to run"
    )
    arguments = parser.parse_args()
    os.chdir(ROOT)
    seconds: dict[str, float] = defaultdict(float)
    digest = code_fingerprint()
    for stage in stages(arguments.full):
        digest = stage_digest(stage, digest)
        seconds[stage.group] += run_stage(stage, digest, DEMO)
        if stage.name == arguments.until:
            return
    write_summary(DEMO, dict(seconds), list(EVALUATED))


if __name__ == "__main__":
    main()
