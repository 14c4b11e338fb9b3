"""Pages a second of an ingest: one process against two worker processes, and what two cores give at best.

Every variant renders the same PDFs to fresh folders, in turn, repeated; medians. "loop" is a bare loop over
the pages in this process, without a corpus; "two loops" are two such processes, each with every other chunk
of pages: the limit of two workers. The ingests are whole: hashes, journal, table, start of the workers. One
thread a process. "CPU s" is the processor time of all processes together, which other programs disturb less.
"""

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[1]))  # before this folder: this file has a module's name

import pypdfium2

from data.chunks import CHUNK_PAGES
from data.corpus import ingest
from data.render import RenderSettings, render_document
from rollout.tables import format_table

SAMPLE = Path(__file__).resolve().parents[2] / "shared" / "data" / "mmlongbench" / "documents"


def loop(paths: list[Path], out: Path, share: int = 0, of: int = 1) -> None:
    """Render every `of`-th chunk of the pages, beginning with chunk `share`."""
    number = 0
    for index, path in enumerate(paths):
        folder = out / str(index)
        folder.mkdir(parents=True, exist_ok=True)
        with pypdfium2.PdfDocument(path) as pdf:
            count = len(pdf)
        for first in range(1, count + 1, CHUNK_PAGES):
            if number % of == share:
                render_document(path, folder, RenderSettings(), first, CHUNK_PAGES)
            number += 1


def two_loops(paths: list[Path], out: Path) -> None:
    """The loop in two processes at once."""
    command = [sys.executable, __file__, *map(str, paths), "--loop", str(out)]
    running = [subprocess.Popen([*command, "--share", str(share)]) for share in range(2)]
    assert all(process.wait() == 0 for process in running)


def processor_seconds() -> float:
    """Processor time of this process and of those that it started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def sample(folder: Path) -> list[Path]:
    """The real sample where it is there, else PDFs of the built-in world."""
    if SAMPLE.is_dir():
        return sorted(SAMPLE.glob("*.pdf"))
    from data.slide_world import make_world, write_world

    write_world(make_world(seed=0), folder)
    return sorted(folder.rglob("*.pdf"))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pdfs", nargs="*", type=Path, help="(default: the sample of MMLongBench-Doc)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--loop", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.loop:
        return loop(arguments.pdfs, arguments.loop, arguments.share, of=2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = arguments.pdfs or sample(folder / "world")
        pages = sum(len(pypdfium2.PdfDocument(path)) for path in paths)
        variants = {
            "loop": loop,
            "ingest, 1 worker": lambda paths, out: ingest(paths, out, workers=1, ocr="off"),
            "ingest, 2 workers": lambda paths, out: ingest(paths, out, workers=2, ocr="off"),
            "two loops": two_loops,
        }
        loop(paths[:1], folder / "warm-up")
        seconds: dict[str, list[float]] = {variant: [] for variant in variants}
        processor: dict[str, list[float]] = {variant: [] for variant in variants}
        for _ in range(arguments.repeats):
            for variant, render in variants.items():
                started, used = perf_counter(), processor_seconds()
                render(paths, folder / "out")
                seconds[variant].append(perf_counter() - started)
                processor[variant].append(processor_seconds() - used)
                shutil.rmtree(folder / "out")
    rates = {variant: pages / median(times) for variant, times in seconds.items()}
    ratios = {
        variant: median(base / time for base, time in zip(seconds["loop"], times))
        for variant, times in seconds.items()
    }
    print(f"{pages} pages of {len(paths)} PDFs, medians of {arguments.repeats}")
    header = ["", "pages/s", "× loop", "CPU s", "seconds"]
    rows = [
        [
            variant,
            f"{rates[variant]:.1f}",
            f"{ratios[variant]:.2f}",
            f"{median(processor[variant]):.1f}",
            " ".join(f"{time:.1f}" for time in times),
        ]
        for variant, times in seconds.items()
    ]
    print(format_table(header, rows))
    two, one, best = (seconds[v] for v in ("ingest, 2 workers", "ingest, 1 worker", "two loops"))
    print(f"2 workers / 1 worker: {median(a / b for a, b in zip(one, two)):.2f}")
    print(f"2 workers / two loops: {median(a / b for a, b in zip(best, two)):.2f}")
    loops = seconds["loop"]
    print(
        "the fastest run of each, for a machine that others use too: "
        f"2 workers / loop {min(loops) / min(two):.2f}, 2 workers / 1 worker {min(one) / min(two):.2f}"
    )


if __name__ == "__main__":
    main()
