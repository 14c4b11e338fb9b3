"""`visor explain`: one row of a run, told from its folder alone: what was asked, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout.compare import load_results
from rollout.inspect_row import find_trajectory
from rollout.manifest import RunManifest, read_manifest
from rollout.results import ResultRow
from rollout.trace import ending_text, printable, turn_text
from visor.types import Invalid, Trajectory, Turn

CANDIDATES_SHOWN = 5


def explain(run: str | Path, question_id: str | None = None, sample_index: int | None = None) -> str:
    """The row of a question and sample (None = the first): question, each turn with its candidates and what
    the layer decided, costs, answer, verdict and reward, and what the run was made with.

    Nothing but the folder is read: corpus, index, model and judge may be gone. ValueError for a row that it
    does not hold.
    """
    trajectory = find_trajectory(run, question_id, sample_index)
    key = trajectory.question_id, trajectory.sample_index
    row = next((r for r in load_results(run) if (r.question_id, r.sample_index) == key), None)
    if row is None:
        raise ValueError(f"{run}: results.jsonl has no row of {key}; run its evaluation again to complete it")
    return "\n".join([*_question(row), *_turns(trajectory, row), *_outcome(trajectory, row), *_made(run)])


def _question(row: ResultRow) -> Iterator[str]:
    yield f"{printable(row.question_id)}, sample {row.sample_index}, system {row.system}, seed {row.seed}"
    yield f"question:   {printable(row.question)}"
    yield f"gold:       {printable(' | '.join(row.gold_answers))}" + (
        f"  ({row.answer_format})" if row.answer_format else ""
    )
    yield f"gold pages: {printable(', '.join(row.gold_page_ids)) or 'none given'}"
    tags = ", ".join(f"{name} {value}" for name, value in row.tags.items() if not name.startswith("_"))
    yield f"tags:       {printable(tags) or 'none'}"


def _turns(trajectory: Trajectory, row: ResultRow) -> Iterator[str]:
    record = trajectory.meta.get("evidence_policy", {})
    decisions = iter(record.get("searches", []))
    slots = record.get("slots", {})
    if slots:
        keywords = printable(", ".join(slots["keywords"]))
        yield f"TAEC {record['operators']}, slots by {slots['extractor']}: {keywords}"
    for turn in trajectory.turns:
        yield turn_text(turn)
        if isinstance(turn.action, Invalid) and turn.action.raw:
            yield f"   the reply: {printable(turn.action.raw)}"
        yield from _cost(turn)
        if turn.query is not None:
            yield from _search(turn, set(row.gold_page_ids), next(decisions, None))
    for note in (*record.get("renders", []), *record.get("allocations", [])):
        yield f"   layer: {printable(_plain(note))}"


def _cost(turn: Turn) -> Iterator[str]:
    completion = turn.completion
    counted = {
        "prompt tokens": completion.prompt_tokens,
        "reply tokens": len(completion.token_ids) if completion.token_ids else completion.completion_tokens,
        "base64 bytes of pictures": completion.image_bytes,
    }
    known = [f"{value:,} {name}" for name, value in counted.items() if value is not None]
    if known and not turn.by_system:
        yield f"   cost: {', '.join(known)}; finished by {completion.finish_reason}"


def _search(turn: Turn, gold: set[str], decision: dict[str, Any] | None) -> Iterator[str]:
    """The best candidates, which of them are gold, and the layer's decision."""
    shown = set(turn.observation.page_ids) if turn.observation else set()
    ranked = [
        f"{rank}. {page_id} {score:.3f}{' shown' * (page_id in shown)}{' GOLD' * (page_id in gold)}"
        for rank, (page_id, score) in enumerate(turn.candidates, start=1)
        if rank <= CANDIDATES_SHOWN or page_id in shown or page_id in gold
    ]
    yield f"   sent to the retriever: {printable(turn.query or '')}  ({turn.retrieval_seconds:.3f} s)"
    yield f"   {len(turn.candidates)} candidates: {printable('; '.join(ranked)) or 'none'}"
    if decision:
        yield f"   layer: {printable(_plain(decision))}"


def _outcome(trajectory: Trajectory, row: ResultRow) -> Iterator[str]:
    yield ending_text(trajectory)
    unknown = "no verdict" if row.finished else "not asked, there is no answer"
    verdict = {True: "right", False: "wrong", None: unknown}[row.verdict]
    scored = f", score {row.score:g}" if row.score is not None else ""
    scored += f", scored as: {printable(row.judged_as)}" if row.judged_as else ""
    yield f"judge:      {row.judge or 'none'}: {verdict}{scored}"
    reward = trajectory.reward
    if reward is not None and reward.judge_reply:
        yield f"  its reply: {printable(reward.judge_reply)}"
    if reward is not None:
        left_out = {"judge", "judge_reply", "verdict", "score", "judged_as"}
        yield f"reward:     {_plain(reward.model_dump(mode='json', exclude=left_out, exclude_none=True))}"
    stages = ", ".join(f"{stage} {value:.2f} s" for stage, value in row.seconds.items())
    yield f"time:       {stages or 'not kept'}"


def _made(run: str | Path) -> Iterator[str]:
    """What the run was made with."""
    manifest: RunManifest = read_manifest(run)
    yield f"run:        {manifest.created}, commit {manifest.git_commit or 'unknown'}" + (
        " with changes" if manifest.git_dirty else ""
    )
    fingerprints = {
        "code": manifest.code_fingerprint,
        "model": _plain(manifest.model),
        "corpus": manifest.corpus.get("hash"),
        "retriever": f"{manifest.index.get('retriever')} {manifest.index.get('retriever_fingerprint')}",
        "questions": manifest.questions.get("hash"),
        "sampling": _plain(manifest.sampling),
        "intervention": _plain(manifest.intervention) if manifest.intervention else None,
    }
    for name, value in fingerprints.items():
        if value:
            yield f"  {name}: {printable(str(value))}"


def _plain(record: dict[str, Any]) -> str:
    """A record as `name value` pairs; parts that are records stand in brackets."""
    return ", ".join(
        f"{name} ({_plain(value)})" if isinstance(value, dict) else f"{name} {value}"
        for name, value in record.items()
        if value not in ("", [], {})
    )
