"""Trajectories on disk: a JSON-lines file of them, or the run folder that holds one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from rollout.recorder import numbered_lines
from rollout.run_folder import TRAJECTORIES_NAME
from visor.types import Trajectory


def trajectories_path(path: str | Path) -> Path:
    """`RUN/trajectories.jsonl` for a run folder, a file as it is. ValueError when there is no such file."""
    path = Path(path)
    file = path / TRAJECTORIES_NAME if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file of trajectories")
    return file


def read_trajectories(path: str | Path) -> Iterator[Trajectory]:
    """Yield the trajectories of a file or run folder; a torn last line is left out.

    ValueError naming file and line for a record that is no trajectory, and for a file without any.
    """
    path, found = trajectories_path(path), False
    for number, record in numbered_lines(path):
        try:
            yield Trajectory.model_validate(record)
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(map(str, problem["loc"]))
            raise ValueError(f"{path}, line {number}: not a trajectory ({place}: {problem['msg']})") from None
        found = True
    if not found:
        raise ValueError(f"{path} holds no trajectory")


def refuse_own_input(source: str | Path, output: str | Path) -> None:
    """ValueError when a command would write over what it reads."""
    if Path(output).exists() and trajectories_path(source).samefile(output):
        raise ValueError(f"{output} is the input as well; name another output file")
