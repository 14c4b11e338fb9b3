"""`visor inspect-row`: one training row, token by token: trained, masked or part of an image."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.recorder import read_lines
from rollout.rows import TrainingRow, trajectory_row, turn_rows
from rollout.trace import printable
from rollout.trajectory_file import trajectories_path
from visor.types import Trajectory

if TYPE_CHECKING:
    from visor.models.base import ImageSource
    from visor.models.rendering import ChatRenderer


def find_trajectory(
    path: str | Path, question_id: str | None = None, sample_index: int | None = None
) -> Trajectory:
    """The first trajectory of a run folder or a trajectories file that has this question and sample.

    None matches any. ValueError when the file is missing or no trajectory matches.
    """
    path = trajectories_path(path)
    for record in read_lines(path):
        if question_id in (None, record["question_id"]) and sample_index in (None, record["sample_index"]):
            return Trajectory.model_validate(record)
    wanted = [] if question_id is None else [f"question {question_id!r}"]
    wanted += [] if sample_index is None else [f"sample {sample_index}"]
    raise ValueError(f"{path} has no trajectory of {', '.join(wanted) or 'any question'}")


def build_row(
    trajectory: Trajectory, renderer: ChatRenderer, images: ImageSource, turn: int | None = None
) -> TrainingRow:
    """The row of the whole trajectory, or of one turn (1-based). ValueError for a turn it does not have."""
    if turn is None:
        return trajectory_row(trajectory, renderer, images)
    if not 1 <= turn <= len(trajectory.turns):
        raise ValueError(f"turn {turn} is not there: the trajectory has {len(trajectory.turns)} turns")
    return turn_rows(trajectory, renderer, images)[turn - 1]


def row_text(row: TrainingRow, renderer: ChatRenderer) -> str:
    """A summary, then a line a token: position, id, mark, text and, where known, the log-probability.

    Marks: `+` trained, `.` masked; the pads of an image are one line, `#`.
    """
    trained, pads = sum(row.loss_mask), sum(end - start for start, end in row.image_spans)
    name = row.trajectory + ("" if row.turn_index is None else f" turn {row.turn_index + 1}")
    masked = len(row.input_ids) - trained - pads
    summary = (
        f"{name}: {len(row.input_ids)} tokens, {trained} trained (+), {masked} masked (.), "
        f"{pads} pads of {len(row.images)} images (#)"
    )
    notes = ["replies were known as text only and tokenised here"] if row.retokenised else []
    notes += [f"{row.turns_cut} turns cut at the length limit"] if row.turns_cut else []
    return "\n".join([summary, *notes, *_token_lines(row, renderer)])


def inspect_row(
    trajectories: str | Path,
    checkpoint: str | Path,
    corpus: str | Path,
    question_id: str | None = None,
    sample_index: int | None = None,
    turn: int | None = None,
) -> str:
    """The text of one row, from files. ValueError for anything missing."""
    from data.corpus import Corpus
    from visor.env.crop import ImageCutter
    from visor.models.loading import load_processor

    trajectory = find_trajectory(trajectories, question_id, sample_index)
    renderer = load_processor(checkpoint).renderer()
    row = build_row(trajectory, renderer, ImageCutter(Corpus.open(corpus)), turn)
    return row_text(row, renderer)


def _token_lines(row: TrainingRow, renderer: ChatRenderer) -> Iterator[str]:
    starts = {start: (end, ref) for (start, end), ref in zip(row.image_spans, row.images, strict=True)}
    position = 0
    while position < len(row.input_ids):
        if position in starts:
            end, ref = starts[position]
            box = f" box {list(ref.box)}" if ref.box else ""
            yield f"{position:6d} {'':>7} #  {end - position} pads of {printable(ref.page_id)}{box}"
            position = end
            continue
        token = row.input_ids[position]
        mark = "+" if row.loss_mask[position] else "."
        logprob = row.old_logprobs[position] if row.old_logprobs and mark == "+" else None
        text = repr(renderer.tokenizer.decode([token]))
        yield f"{position:6d} {token:7d} {mark}  {text}" + ("" if logprob is None else f"  {logprob:.4f}")
        position += 1
