"""A finished run judged by another judge: its verdicts kept in the run folder, beside the run's own."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from rewards.judge import Judge
from rewards.judge_replies import Verdict
from rewards.scorers import averdict_on
from rollout.compare import load_results
from rollout.recorder import Recorder, mend, read_lines, rewrite
from rollout.results import ResultRow
from visor.types import SCHEMA_VERSION, Question, Record

FOLDER_NAME = "judgements"
FORMATS_NEEDED = "mmlongbench"
"""The scorer that needs the answer formats, which rows of older runs do not have."""


class Judgement(Record):
    """What a judge says of the answer of one row."""

    schema_version: int = SCHEMA_VERSION
    question_id: str
    sample_index: int = 0
    judge: str
    asked: str
    """SHA-256 of what the verdict depends on: judge and wording, question, reference, format and answer."""
    verdict: bool | None
    """None: no verdict; asked again by the next call."""
    score: float | None = None
    judged_as: str = ""
    """The short form of the answer that was scored, where a model made one."""
    raw: str = ""
    """The reply that it was read from."""
    error: str = ""
    """Why there is no verdict."""


def judgement_path(folder: str | Path, judge: str) -> Path:
    """The file of a judge's verdicts on a run."""
    readable = re.sub(r"[^A-Za-z0-9._+-]+", "_", judge)[:60]
    return Path(folder) / FOLDER_NAME / f"{readable}-{hashlib.sha256(judge.encode()).hexdigest()[:8]}.jsonl"


def judge_run(
    folder: str | Path,
    judge: Judge,
    max_concurrency: int = 64,
    on_done: Callable[[int, int], None] | None = None,
) -> list[Judgement]:
    """Judge the answers of a run that this judge has not judged yet, and return all its judgements.

    Nothing of the run itself is changed. Verdicts are written as they come (`judgement_path`), so that a call
    that was killed goes on; one of an answer that has changed since, or by another wording, and one that
    failed, are asked for again. Rows without an answer have nothing to judge. `on_done` gets (done, to do).
    ValueError for a folder without results, or without the answer formats that the judge needs.
    """
    rows = [row for row in load_results(folder) if row.finished and not row.error]
    if judge.name.partition("+")[0] == FORMATS_NEEDED:
        _check_formats(rows, folder)
    path = judgement_path(folder, judge.name)
    wanted = {(row.question_id, row.sample_index): asked_of(judge, row) for row in rows}
    stored = [Judgement.model_validate(record) for record in read_lines(path)] if path.exists() else []
    mend(path)
    kept = [
        entry
        for entry in stored
        if entry.verdict is not None and wanted.get((entry.question_id, entry.sample_index)) == entry.asked
    ]
    if len(kept) < len(stored):
        rewrite(path, (entry.model_dump(mode="json") for entry in kept))
    judgements = list(kept)
    with Recorder(path) as recorder:
        missing = [row for row in rows if (row.question_id, row.sample_index) not in recorder.done]

        def keep(row: ResultRow, verdict: Verdict) -> None:
            entry = Judgement(
                question_id=row.question_id,
                sample_index=row.sample_index,
                judge=judge.name,
                asked=wanted[row.question_id, row.sample_index],
                verdict=verdict.value,
                score=verdict.score,
                judged_as=verdict.judged_as,
                raw=verdict.raw,
                error=verdict.error,
            )
            recorder.append(entry)
            judgements.append(entry)
            if on_done:
                on_done(len(judgements) - len(kept), len(missing))

        asyncio.run(_judge_all(judge, missing, keep, max_concurrency))
    return judgements


async def _judge_all(
    judge: Judge, rows: Sequence[ResultRow], keep: Callable[[ResultRow, Verdict], None], max_concurrency: int
) -> None:
    left = iter(rows)

    async def work() -> None:
        for row in left:
            keep(row, await averdict_on(judge, _question(row), row.answer or ""))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(max_concurrency, len(rows))):
                group.create_task(work())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


def asked_of(judge: Judge, row: ResultRow) -> str:
    """The `Judgement.asked` of a row."""
    identity = getattr(judge, "fingerprint", judge.name)
    parts = [identity, row.question, row.gold_answers, row.answer_format, row.answer]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _question(row: ResultRow) -> Question:
    return Question(
        question_id=row.question_id,
        text=row.question,
        gold_answers=row.gold_answers,
        gold_page_ids=row.gold_page_ids,
        answer_format=row.answer_format,
        tags=row.tags,
    )


def _check_formats(rows: Sequence[ResultRow], folder: str | Path) -> None:
    if any(row.tags.get("benchmark") == "mmlongbench" and not row.answer_format for row in rows):
        raise ValueError(
            f"the rows of {folder} do not hold the answer formats, which this judge needs; the command that "
            "made the run, given again, adds them and asks nothing twice"
        )
