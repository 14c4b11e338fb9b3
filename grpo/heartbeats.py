"""How long each process of a run has been without progress, as the others see it: one small file each.

Files in the run's folder, because a process that waits for another one cannot ask it anything; on machines
that do not share the folder the others are not seen, and count as going on.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

FOLDER = ".heartbeats"


class Heartbeats:
    """The heartbeats of process `rank` of `size`, below the run's folder."""

    def __init__(self, output_dir: Path, rank: int, size: int) -> None:
        self.folder = output_dir / FOLDER
        self.rank = rank
        self.size = size

    def beat(self, seconds_still: float) -> None:
        """Say that this process last moved so many seconds ago."""
        path = self.folder / str(self.rank)
        moved = time.time() - seconds_still
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path.touch()
            os.utime(path, (moved, moved))
        except OSError:
            return  # a full disk is reported where something is lost by it

    def others_hang(self, seconds: float) -> bool:
        """Whether every other process is seen, and none has moved within the last so many seconds."""
        return all(self._still(rank) > seconds for rank in range(self.size) if rank != self.rank)

    def _still(self, rank: int) -> float:
        """Seconds without progress; 0 for a process that is not seen."""
        try:
            return time.time() - (self.folder / str(rank)).stat().st_mtime
        except OSError:
            return 0.0
