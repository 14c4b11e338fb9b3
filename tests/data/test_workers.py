"""A document that kills its worker: the failure is that document's alone."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

from data.render import RenderSettings
from data.workers import CHUNK_PAGES, Chunk, render_chunks

CRASHING = """
import os, sys
import data.workers
from data.render import RenderedPages

def render(path, folder, settings, first, count):
    if path.name == "bad.pdf":
        os._exit(11)
    if path.name == "raises.pdf":
        raise RuntimeError("inside")
    return RenderedPages(page_count=40)

data.workers.render_document = render  # in this process and, as its main module, in the workers

if __name__ == "__main__":
    from pathlib import Path
    names = ["a.pdf", "bad.pdf", "raises.pdf", "b.pdf", "c.pdf"]
    chunks = [Chunk(n, Path(n), Path("."), RenderSettings()) for n in names]
    for result in render_chunks(chunks, 2):
        print(result.chunk.doc_id, result.chunk.first, result.error, sep="|")
"""


def test_a_crash_is_blamed_on_its_document(tmp_path):
    script = tmp_path / "crash.py"
    imports = "from data.render import RenderSettings\nfrom data.workers import Chunk, render_chunks\n"
    script.write_text(imports + CRASHING)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    lines = [line.split("|") for line in done.stdout.splitlines()]
    errors = {doc_id: error for doc_id, _, error in lines if error}
    assert errors == {
        "bad.pdf": "bad.pdf crashed the process that rendered it",
        "raises.pdf": "raises.pdf failed: RuntimeError: inside",
    }
    good = sorted((doc_id, int(first)) for doc_id, first, error in lines if not error)
    assert good == [(n, first) for n in ("a.pdf", "b.pdf", "c.pdf") for first in (1, 17, 33)]


def test_chunks_cover_a_document_once(make_pdf, tmp_path):
    path = make_pdf(tmp_path / "a.pdf", [str(n) for n in range(1, 2 * CHUNK_PAGES + 2)])
    results = list(render_chunks([Chunk("a", path, tmp_path, RenderSettings())], 1))
    numbers = [page.number for result in results for page in result.rendered.pages]
    assert numbers == list(range(1, 2 * CHUNK_PAGES + 2))
    assert len(results) == Chunk.chunks_of(2 * CHUNK_PAGES + 1) == 3


def test_workers_end_when_their_parent_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent("""
        import os, time
        from data.workers import _new_executor
        if __name__ == "__main__":
            executor = _new_executor(1)
            print(executor.submit(os.getpid).result(), flush=True)
            time.sleep(60)
        """)
    )
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
