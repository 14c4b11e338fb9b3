"""What the commands of this folder share: how a mistake of the user ends them, and questions by id."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from data.corpus import Corpus
from data.questions import load_questions
from visor.types import Question, Trajectory


@contextmanager
def explained(prog: str) -> Iterator[None]:
    """Turn a ValueError or a file that cannot be read into one line and exit status 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def questions_of(
    trajectories: Sequence[Trajectory], spec: str, corpus: Corpus | None = None
) -> dict[str, Question]:
    """The questions of "reader:PATH" by id; ValueError when those of the trajectories are not among them."""
    questions = {question.question_id: question for question in load_questions(spec, corpus)}
    unknown = sorted({trajectory.question_id for trajectory in trajectories} - questions.keys())
    if unknown:
        raise ValueError(f"{spec} lacks questions of the trajectories, such as {unknown[:3]}")
    return questions
