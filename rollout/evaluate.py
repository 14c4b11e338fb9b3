"""`python -m rollout.evaluate`: run a system over a question set, score it, write a run folder.

    python -m rollout.evaluate --checkpoint CKPT --benchmark questions:dev.jsonl --corpus CORPUS --output RUN

The same command run again goes on where it stopped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from data.corpus import Corpus
from data.question_files import read_summary
from data.questions import load_questions
from rewards import get_reward
from rollout.analyses.prices import completion_tokens, prompt_tokens
from rollout.build import (
    Agent,
    AgentConfig,
    JudgeOptions,
    agent_manifest,
    build_agent,
    describe_model,
    make_judge,
    make_system,
)
from rollout.engine import EpisodeJob, RolloutEngine
from rollout.frozen import FrozenRetriever, IntervenedSystem, describe_intervention
from rollout.manifest import (
    MANIFEST_NAME,
    MixedRunError,
    RunManifest,
    open_run,
    read_manifest,
)
from rollout.metrics import Metrics
from rollout.outcome import failure, reasons
from rollout.pressure import PressuredClient
from rollout.progress import Progress
from rollout.recorder import read_lines
from rollout.results import ResultRow
from rollout.run_folder import RESULTS_NAME, TRAJECTORIES_NAME, RunFolder
from rollout.tables import metrics_table
from visor.config import parse_cli
from visor.env.crop import ImageCutter
from visor.models.base import PolicyClient
from visor.retrieval.http_session import RetrievalError
from visor.retrieval.index import corpus_hash
from visor.types import Question, Trajectory
from visor.wording import counted


class EvaluateConfig(AgentConfig):
    """One evaluation run."""

    benchmark: str
    """Questions as reader:PATH: questions:, mmlongbench:, vidoseek:, …"""
    output: str
    """Run folder."""
    judge: str = "rule"
    """rule, the scorer of a benchmark (mmlongbench, slidevqa), or the spec of a model that judges answers."""
    judge_options: JudgeOptions = Field(default_factory=JudgeOptions)
    reward: str = "visor"
    """Name of the reward, one of `rewards.REWARDS`."""
    samples: int = Field(1, ge=1)
    """Samples of each question."""
    limit: int | None = Field(None, ge=1)
    """Only the first so many questions."""
    budget: int | None = Field(None, ge=1)
    """Tokens of prompts and replies that this command may take. Once they are taken no further question is
    asked; the same command asks the rest. Questions under way are finished, so it ends a little above."""
    seed: int = 0
    max_concurrency: int = Field(64, ge=1)
    """Episodes running at once."""
    resume: bool = True
    """Go on in a folder that holds rows; false refuses such a folder."""
    retry_failed: bool = True
    """When resuming, ask questions with a fault again and judge answers without a verdict again; false keeps
    both as they are."""
    allow_mixed: bool = False
    """Add to a folder whose rows were made with something else."""
    expected_retriever: str | None = None
    """Retriever fingerprint that the run must have; another one stops it before it starts."""
    pressure_tokens: int = Field(0, ge=0)
    """Context pressure: neutral tokens added to every prompt of the policy, four bytes each."""
    frozen_retrieval: str | None = None
    """A run folder over the same questions, whose searches answer the searches of this run in their order."""
    sync_every: int = Field(1, ge=1)
    """Rows between two fsyncs."""
    prompt_ids: bool = False
    """Write the prompt's token ids of each call into trajectories.jsonl; they follow from its messages."""


def evaluate(config: EvaluateConfig, client: PolicyClient | None = None) -> Metrics:
    """Run an evaluation and return its metrics; `client` stands in for the configured model.

    Raises ValueError for a configuration that cannot run, MixedRunError for a folder of another run.
    """
    reward = get_reward(config.reward)
    frozen = FrozenRetriever(config.frozen_retrieval) if config.frozen_retrieval else None
    agent = build_agent(config, client, frozen)
    questions = _load_questions(config.benchmark, agent.corpus)
    _intervene(config, agent, questions, frozen)
    judge = make_judge(config.judge, ImageCutter(agent.corpus), config.judge_options)
    manifest = make_manifest(config, agent, questions, judge.name)
    _check_folder(config, manifest)
    for note in open_run(config.output, manifest, config.allow_mixed):
        print(f"mixed run: {note}", file=sys.stderr)
    engine = RolloutEngine(agent.system, judge, reward, config.max_concurrency)
    by_id = {question.question_id: question for question in questions}
    folder = RunFolder(config.output, by_id, config.sync_every, config.prompt_ids)
    try:
        wanted = [
            EpisodeJob(question, config.seed, sample)
            for question in questions[: config.limit]
            for sample in range(config.samples)
        ]
        folder.resume(engine, config.retry_failed, {job.key for job in wanted})
        jobs = folder.missing(wanted)
        progress = Progress(len(jobs), done_before=len(folder.keys))
        taken = 0.0

        def on_done(job: EpisodeJob, trajectory: Trajectory) -> None:
            nonlocal taken
            row = folder.add(job, trajectory)
            taken += prompt_tokens(row) + completion_tokens(row)
            progress.update(row)

        engine.run_each(jobs, on_done, lambda: config.budget is not None and taken >= config.budget)
        progress.close()
        if left := len(folder.missing(jobs)):
            asked = counted(left, "question is", "questions are")
            print(f"the budget of {config.budget:,} tokens is spent: {asked} not asked", file=sys.stderr)
    finally:
        folder.close()
    return folder.finish()


def _intervene(
    config: EvaluateConfig, agent: Agent, questions: Sequence[Question], frozen: FrozenRetriever | None
) -> None:
    """Put the agent's system under the configured intervention. The layer's own call is under none."""
    record = describe_intervention(config.pressure_tokens, frozen)
    if not record:
        return
    if frozen is not None:
        asked = [question.question_id for question in questions[: config.limit]]
        frozen.check(asked, corpus_hash(agent.corpus.pages()))
    if config.pressure_tokens:
        pressured = PressuredClient(agent.client, config.pressure_tokens)
        agent.system = make_system(config, agent.corpus, agent.retriever, pressured, agent.client)
    agent.system = IntervenedSystem(agent.system, record, frozen)


def make_manifest(
    config: EvaluateConfig, agent: Agent, questions: Sequence[Question], judge: str
) -> RunManifest:
    """What this run is made with."""
    described = config.model is not None or config.checkpoint is not None
    given = {"kind": "given", "name": agent.client.name}
    manifest = agent_manifest(
        config,
        agent,
        describe_model(config.model_spec) if described else given,
        questions,
        judge,
        benchmark=config.benchmark,
        seed=config.seed,
    )
    frozen = agent.retriever if isinstance(agent.retriever, FrozenRetriever) else None
    manifest.intervention = describe_intervention(config.pressure_tokens, frozen)
    return manifest


def _load_questions(benchmark: str, corpus: Corpus) -> list[Question]:
    problems: list[str] = []
    questions = load_questions(benchmark, corpus, problems)
    for problem in problems:
        print(f"questions: {problem}", file=sys.stderr)
    if problems:
        print(f"questions: {read_summary(questions, problems)}", file=sys.stderr)
    if not questions:
        raise ValueError(f"{benchmark} holds no question")
    return questions


def _check_folder(config: EvaluateConfig, manifest: RunManifest) -> None:
    fingerprint = manifest.index["retriever_fingerprint"]
    if config.expected_retriever not in (None, fingerprint):
        raise ValueError(
            f"the retriever's fingerprint is {fingerprint}, expected {config.expected_retriever}: "
            "the index or the corpus is another one"
        )
    output = Path(config.output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"the output {output} is a file; name a run folder, new or begun by this command")
    if not config.resume and output.is_dir() and any(output.iterdir()):
        raise ValueError(f"{output} is not empty; take another output folder, or let the run --resume true")
    if config.allow_mixed:
        return
    if not (output / MANIFEST_NAME).exists():
        for path in (output / TRAJECTORIES_NAME, output / RESULTS_NAME):
            if path.exists() and path.stat().st_size:
                raise MixedRunError(
                    f"{output} holds rows in {path.name} but no {MANIFEST_NAME} that says what made them; "
                    "take another output folder, or --allow_mixed to add to it all the same"
                )
    else:
        stored = read_manifest(output).arguments.get("reward", EvaluateConfig.model_fields["reward"].default)
        if stored != config.reward:
            raise MixedRunError(
                f"{output} holds rows scored with the reward {stored!r}, not {config.reward!r}; take another "
                "output folder, or --allow_mixed to add to it all the same"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0, 1 when no row could be used, 2 with a message for a mistake of the user, 130 when
    interrupted."""
    config = parse_cli(EvaluateConfig, argv, "python -m rollout.evaluate", "Evaluate a system.")
    started = time.perf_counter()
    try:
        metrics = evaluate(config)
    except (ValueError, RetrievalError) as error:
        print(f"rollout.evaluate: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nstopped; the same command goes on in {config.output}", file=sys.stderr)
        return 130
    print(metrics_table(metrics))
    print(f"\n{config.output} ({time.perf_counter() - started:.1f} s)")
    rows = [ResultRow.model_validate(record) for record in read_lines(Path(config.output, RESULTS_NAME))]
    found = reasons(rows)
    for reason in found:
        print(reason, file=sys.stderr)
    failed = failure(rows)
    if failed or found:
        what = failed or "some rows failed"
        print(f"rollout.evaluate: {what}; the same command asks and judges them again", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
