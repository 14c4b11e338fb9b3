"""Stages that depend on one another, run a few at a time; an independent one goes on when another fails."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from fnmatch import fnmatch
from pathlib import Path

from scripts.stages import Stage, StageFailed, read_mark, run_stage, stage_digest


def digests(stages: Iterable[Stage]) -> dict[str, str]:
    """The digest of each stage, over its commands, its configuration files and the stages it needs."""
    found: dict[str, str] = {}
    for stage in stages:
        found[stage.name] = stage_digest(stage, " ".join(found[name] for name in stage.after))
    return found


def select(stages: Sequence[Stage], patterns: Sequence[str]) -> list[Stage]:
    """The stages whose names match a pattern of the shell's kind, and all that they need, in order.

    ValueError for a pattern that matches none.
    """
    wanted: set[str] = set()
    for pattern in patterns:
        matching = {stage.name for stage in stages if fnmatch(stage.name, pattern)}
        if not matching:
            raise ValueError(f"no stage matches {pattern!r}; `list` names them")
        wanted |= matching
    for stage in reversed(stages):
        if stage.name in wanted:
            wanted.update(stage.after)
    return [stage for stage in stages if stage.name in wanted]


def state(stage: Stage, root: Path, digest: str, code: str) -> str:
    """Of one stage, for a list: "done", "done (other code)", "begun", "outdated" or "to do"."""
    mark = read_mark(root, stage.name)
    if not mark:
        return "to do"
    if mark["digest"] != digest:
        return "outdated"
    if not mark["done"]:
        return "begun"
    return "done" if mark.get("code") == code else "done (other code)"


def run_graph(
    stages: Sequence[Stage], root: Path, code: str, jobs: int = 2, same_code: bool = False
) -> dict[str, float]:
    """Run every stage once what it needs is done, `jobs` at a time, the earlier in the list first.

    `code` names the present code. Results that other code made are kept unless `same_code`: a study takes
    hours, and its run folders say which code made each of them. Returns seconds by stage; raises StageFailed
    at the end, naming the failed stages, after everything that does not need them is done.
    """
    found = digests(stages)
    waiting, seconds, failed = list(stages), {}, {}
    with ThreadPoolExecutor(jobs) as pool:
        running: dict[Future[float], Stage] = {}
        while waiting or running:
            waiting = [s for s in waiting if not _blocked(s, failed)]
            ready = [s for s in waiting if all(name in seconds for name in s.after)]
            for stage in ready[: jobs - len(running)]:
                waiting.remove(stage)
                made_by = code if same_code else _kept_code(stage, root, found[stage.name], code)
                log = root / "logs" / f"{stage.name}.log"
                future = pool.submit(run_stage, stage, found[stage.name], root, made_by, log, quiet=True)
                running[future] = stage
            for future in wait(running, return_when=FIRST_COMPLETED).done if running else ():
                stage = running.pop(future)
                try:
                    seconds[stage.name] = future.result()
                except StageFailed as error:
                    failed[stage.name] = str(error)
                    print(f"{error}; see {root / 'logs' / stage.name}.log", flush=True)
    if failed:
        raise StageFailed(f"failed: {', '.join(failed)}; what needs them was left out")
    return seconds


def _blocked(stage: Stage, failed: dict[str, str]) -> bool:
    """A stage that needs a failed one fails with it, without running."""
    if not any(name in failed for name in stage.after):
        return False
    failed[stage.name] = "needs a failed stage"
    return True


def _kept_code(stage: Stage, root: Path, digest: str, code: str) -> str:
    mark = read_mark(root, stage.name)
    finished = mark.get("digest") == digest and mark["done"]
    return mark.get("code", "") if finished else code
