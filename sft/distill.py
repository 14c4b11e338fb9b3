r"""Distillation: a teacher answers training questions in the environment; its trajectories are recorded.

    python -m sft.distill --model openai:NAME@URL --corpus CORPUS --questions questions:train.jsonl \
        --output trajectories.jsonl

The context is the plain append-only one, without window and evidence block (VISOR section 3.3), unless the
episode settings say otherwise. The same command again goes on where it stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence, Set
from pathlib import Path

from pydantic import Field

from data.questions import load_questions
from rollout.build import AgentConfig, agent_manifest, build_agent, describe_model, make_judge
from rollout.engine import EpisodeJob, RolloutEngine
from rollout.manifest import RunManifest, open_output
from rollout.outcome import reasons
from rollout.recorder import Key, Recorder, read_lines, rewrite, sample_key
from rollout.results import ResultRow, result_row
from sft.command import explained
from visor.config import parse_cli
from visor.env.config import EpisodeConfig
from visor.env.crop import ImageCutter
from visor.models.base import PolicyClient
from visor.types import Question, Trajectory


def append_context() -> EpisodeConfig:
    """The paper's main setting with every turn kept and no evidence block."""
    return EpisodeConfig(window=None, evidence_space=False)


class DistillConfig(AgentConfig):
    questions: str
    """Training questions as reader:PATH."""
    output: str
    """JSON lines of trajectories; existing ones are kept and not asked again, but for failed ones. They must
    have been made with the same settings."""
    episode: EpisodeConfig = Field(default_factory=append_context)
    samples: int = Field(1, ge=1)
    """Trajectories of each question."""
    limit: int | None = Field(None, ge=1)
    """Only the first so many questions."""
    judge: str = "rule"
    """rule, or the spec of a model that judges answers."""
    seed: int = 0
    max_concurrency: int = Field(16, ge=1)
    """Episodes running at once."""
    allow_mixed: bool = False
    """Add to an output that was made with other settings."""


def distill(config: DistillConfig, client: PolicyClient | None = None) -> tuple[int, int]:
    """Record what is missing; returns (answered, failed). `client` stands in for the configured model.

    A trajectory that a fault of the environment or of the teacher's endpoint ended is recorded with its
    `error`, so that no question is missing from the file; the next run asks it again. `OUTPUT.manifest.json`
    says what made the file; MixedRunError when it was something else.
    """
    if config.system != "visor":
        raise ValueError(
            f"SFT data is made of trajectories of the system visor; {config.system} has other prompts and "
            "actions, so evaluate it instead"
        )
    agent = build_agent(config, client)
    questions = load_questions(config.questions, agent.corpus)[: config.limit]
    judge = make_judge(config.judge, ImageCutter(agent.corpus))
    engine = RolloutEngine(agent.system, judge, max_concurrency=config.max_concurrency)
    wanted = {
        (question.question_id, sample): EpisodeJob(question, config.seed, sample)
        for question in questions
        for sample in range(config.samples)
    }
    model = describe_model(config.model_spec) if client is None else {"kind": "given", "name": client.name}
    manifest = agent_manifest(
        config, agent, model, questions, judge.name, benchmark=config.questions, seed=config.seed
    )
    _check_output(config, manifest)
    failed = 0
    _drop_failed(Path(config.output), wanted.keys())
    with Recorder(config.output) as recorder:
        jobs = [job for key, job in wanted.items() if key not in recorder.done]

        def on_done(job: EpisodeJob, trajectory: Trajectory) -> None:
            nonlocal failed
            recorder.append(trajectory)
            if trajectory.error:
                failed += 1
                print(f"{job.question.question_id}: {trajectory.error.message}", file=sys.stderr)

        engine.run_each(jobs, on_done)
        return len(jobs) - failed, failed


def _check_output(config: DistillConfig, manifest: RunManifest) -> None:
    """ValueError when the output holds something else, or trajectories made with other settings."""
    path = Path(config.output)
    if path.is_file() and any("turns" not in record for record in read_lines(path)):
        raise ValueError(f"{path} holds other records than trajectories; take another output file")
    for note in open_output(path, manifest, config.allow_mixed):
        print(f"mixed trajectories: {note}", file=sys.stderr)


def _drop_failed(path: Path, wanted: Set[Key]) -> None:
    """Take the failed trajectories that this run asks again out of the file; others stay."""
    if not path.exists():
        return
    failed = {sample_key(record) for record in read_lines(path) if record.get("error")} & wanted
    if failed:
        rewrite(path, (record for record in read_lines(path) if sample_key(record) not in failed))


def _rows(path: str) -> list[ResultRow]:
    """The recorded trajectories, condensed; their faults and verdicts need no gold answers."""
    trajectories = map(Trajectory.model_validate, read_lines(path))
    return [result_row(t, Question(question_id=t.question_id, text=t.question)) for t in trajectories]


def main(argv: Sequence[str] | None = None) -> None:
    """The command; exit status 1 when the file holds no trajectory with a judged answer."""
    config = parse_cli(
        DistillConfig, argv, prog="sft.distill", description="Record a teacher's trajectories."
    )
    with explained("sft.distill"):
        recorded, failed = distill(config)
        rows = _rows(config.output)
    print(f"{recorded} trajectories recorded, {failed} more that failed; another run asks those again")
    for reason in reasons(rows):
        print(reason, file=sys.stderr)
    if not any(row.finished and not row.error and not row.unjudged for row in rows):
        print(f"sft.distill: {config.output} holds no trajectory with a judged answer", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
