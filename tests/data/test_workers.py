"""The pool of worker processes: what kills, stalls or breaks a worker is a failure of its task alone."""

import os
import subprocess
import sys
import textwrap
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from data.chunks import CHUNK_PAGES, Chunk, count_chunks, rendered_pages
from data.render import RenderSettings
from data.workers import Outcome, WorkerPool


@dataclass(frozen=True)
class Job:
    name: str
    folder: Path

    def request(self):
        return {"task": "job", "path": str(self.folder / self.name), "name": self.name}


@pytest.fixture
def command(tmp_path, monkeypatch):
    """A worker that really dies, hangs, raises and lacks room, by the name of its job."""
    script = tmp_path / "worker.py"
    script.write_text(
        textwrap.dedent("""
        import errno, os, signal, sys, time
        from pathlib import Path
        from data.pdf import DocumentError
        from data.worker_process import main

        def job(request):
            name, path = request["name"], Path(request["path"])
            if name == "dies":
                os.abort()
            if name == "dies once" and not path.exists():
                path.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if name == "hangs":
                time.sleep(3600)
            if name == "raises":
                raise RuntimeError("inside")
            if name == "refuses":
                raise DocumentError("refuses is not a PDF")
            if name == "full":
                raise OSError(errno.ENOSPC, "No space left on device")
            if name == "takes memory":
                return len(bytearray(8 << 30))
            if name.startswith("process"):
                return os.getpid()
            print("noise on standard output")
            return name * 100_000

        main({"job": job})
        """)
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    return [sys.executable, str(script)]


def run(command, names, folder, workers=2, time_limit=60.0):
    jobs = iter([Job(name, folder) for name in names])
    with WorkerPool(workers, time_limit, command) as pool:
        return {task.name: outcome for task, outcome in pool.run(lambda: next(jobs, None))}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_crash_is_blamed_on_its_task(command, tmp_path, workers):
    names = ["a", "dies", "b", "raises", "dies once", "refuses", "full", "takes memory", "c"]
    outcomes = run(command, names, tmp_path, workers)
    assert sorted(outcomes) == sorted(names)
    good = {name: outcome.value for name, outcome in outcomes.items() if not outcome.error}
    assert good == {name: name * 100_000 for name in ("a", "b", "c", "dies once")}
    bad = {name: (outcome.error, outcome.kind) for name, outcome in outcomes.items() if outcome.error}
    assert bad == {
        "dies": ("dies: crashed the process that worked on it (SIGABRT)", "document"),
        "raises": ("raises failed: RuntimeError: inside", "document"),
        "refuses": ("refuses is not a PDF", "document"),
        "full": ("[Errno 28] No space left on device", "disk"),
        "takes memory": ("takes memory needs more than 4 GiB of memory", "document"),
    }


def test_a_task_that_takes_too_long_is_ended_and_the_others_go_on(command, tmp_path):
    outcomes = run(command, ["hangs", "a", "b", "c"], tmp_path, time_limit=2)
    assert outcomes.pop("hangs") == Outcome(error="hangs: took longer than 2 s", kind="document")
    assert [outcome.error for outcome in outcomes.values()] == ["", "", ""]


def test_outcomes_bring_new_tasks(command, tmp_path):
    queue, done = [Job("a", tmp_path)], []

    def next_job():
        return queue.pop() if queue else None

    with WorkerPool(2, command=command) as pool:
        for task, _ in pool.run(next_job):
            done.append(task.name)
            if len(done) < 6:
                queue.extend([Job(f"{len(done)}", tmp_path), Job(f"{len(done)}+", tmp_path)])
    assert len(done) == 11


def test_workers_that_do_not_start_say_why(tmp_path):
    with pytest.raises(RuntimeError, match=r"does not start: .*No module named nothing_here"):
        run([sys.executable, "-m", "nothing_here"], ["a"], tmp_path)


def test_workers_are_replaced_after_many_tasks(command, tmp_path, monkeypatch):
    monkeypatch.setattr("data.workers.TASKS_PER_WORKER", 3)
    outcomes = run(command, [f"process {n}" for n in range(10)], tmp_path, workers=1)
    shares = Counter(outcome.value for outcome in outcomes.values())
    assert sorted(shares.values()) == [1, 3, 3, 3]


def test_nothing_to_do_starts_nothing(tmp_path):
    assert run(["/no/such/program"], [], tmp_path) == {}


def test_an_unfinished_job_leaves_no_process(command, tmp_path):
    jobs = iter([Job("a", tmp_path), Job("hangs", tmp_path)])
    with WorkerPool(2, command=command) as pool:
        next(pool.run(lambda: next(jobs, None)))
        processes = [worker.process for worker in pool._workers]
    assert all(process.poll() is not None for process in processes)


# ---------------------------------------------------------------- chunks


def chunk_of(path, tmp_path, first=1):
    return Chunk("a", path, tmp_path / "images", tmp_path / "journal", RenderSettings(dpi=30), first)


@pytest.mark.parametrize("pages", [1, CHUNK_PAGES, CHUNK_PAGES + 1, 5 * CHUNK_PAGES - 1])
def test_chunks_cover_a_document_once(tmp_path, pages):
    first = chunk_of(tmp_path / "a.pdf", tmp_path)
    chunks = [first, *first.following(pages)]
    assert [chunk.first for chunk in chunks] == list(range(1, pages + 1, CHUNK_PAGES))
    assert len(chunks) == count_chunks(pages)


def test_one_big_document_is_spread_over_the_workers(make_pdf, tmp_path, monkeypatch):
    """A chunk is rendered once two processes have one: with a single process the first would wait in vain."""
    path = make_pdf(tmp_path / "a.pdf", [str(n) for n in range(1, 6 * CHUNK_PAGES + 1)], size=(600, 800))
    script = tmp_path / "worker.py"
    script.write_text(
        textwrap.dedent("""
        import os, time
        from pathlib import Path
        from data.chunks import run_chunk
        from data.worker_process import main

        started = Path(__file__).parent / "started"

        def render(request):
            (started / str(os.getpid())).touch()
            give_up = time.monotonic() + 60
            while len(list(started.iterdir())) < 2 and time.monotonic() < give_up:
                time.sleep(0.01)
            return run_chunk(request) | {"process": os.getpid()}

        main({"render": render})
        """)
    )
    (tmp_path / "started").mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    first = chunk_of(path, tmp_path)
    chunks = iter([first, *first.following(6 * CHUNK_PAGES)])
    with WorkerPool(2, command=[sys.executable, str(script)]) as pool:
        values = [outcome.value for _, outcome in pool.run(lambda: next(chunks, None))]
    shares = Counter(value["process"] for value in values)
    assert len(shares) == 2
    numbers = sorted(page.number for value in values for page in rendered_pages(value).pages)
    assert numbers == list(range(1, 6 * CHUNK_PAGES + 1))


def test_workers_end_when_their_parent_is_killed(tmp_path, monkeypatch):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent("""
        import sys, time
        from data.workers import _Worker, worker_command
        worker = _Worker(worker_command())
        while worker.receive() is None:
            time.sleep(0.01)
        print(worker.process.pid, flush=True)
        time.sleep(60)
        """)
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()

    def running() -> bool:
        stat = Path(f"/proc/{worker}/stat")
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"

    deadline = time.monotonic() + 10
    while running() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running()
