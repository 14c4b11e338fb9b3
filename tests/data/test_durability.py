"""kill -9 at any moment leaves a corpus that opens and continues where it was; so does a full disk."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from data.chunks import CHUNK_PAGES
from data.corpus import Corpus, ingest


def start(docs, out, *options):
    """An ingest as a user starts it, in a process group of its own."""
    command = [sys.executable, "-m", "visor.cli", "ingest", str(docs), "-o", str(out), *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def contents(out):
    """Every file of a corpus but the lock, and the rows and metadata of its table."""
    files = {path.relative_to(out): path for path in sorted(out.rglob("*")) if path.is_file()}
    data = {str(name): path.read_bytes() for name, path in files.items() if name.name not in (".lock",)}
    table = pq.read_table(out / "pages.parquet")
    return data.pop("pages.parquet"), data, table.to_pylist(), table.schema.metadata


def check_opens(out):
    """The corpus opens, and every page it names has an image. Returns its number of pages."""
    corpus = Corpus.open(out)
    counts = corpus.page_counts()
    assert sum(counts.values()) == len(corpus.pages())
    corpus.check_images()
    for page in corpus.pages()[::7]:
        assert corpus.image(page.page_id).size == (page.width, page.height)
    return len(corpus.pages())


@pytest.fixture
def docs(make_pdf, tmp_path):
    rng = random.Random(0)
    for number in range(10):
        texts = [f"{number} {n}" for n in range(rng.randrange(1, 30))]
        make_pdf(tmp_path / "docs" / f"n{number}.pdf", texts, size=(200, 250))
    make_pdf(tmp_path / "docs" / "long.pdf", [f"long {n}" for n in range(60)], size=(200, 250))
    (tmp_path / "docs" / "bad.pdf").write_text("no")
    return tmp_path / "docs"


@pytest.mark.parametrize("kills", [3, pytest.param(15, marks=pytest.mark.slow)])
def test_killed_again_and_again_it_ends_like_an_unbroken_ingest(docs, tmp_path, kills):
    started = time.monotonic()
    ingest([docs], tmp_path / "whole", workers=2)
    whole = time.monotonic() - started
    out, rng, pages = tmp_path / "corpus", random.Random(kills), 0
    for _ in range(kills):
        process = start(docs, out, "--workers", "2")
        time.sleep(rng.uniform(0, 1.3 * whole))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        if (out / "pages.parquet").exists():
            now = check_opens(out)
            assert now >= pages  # nothing that was saved is lost
            pages = now
    ingest([docs], out, workers=2)
    parquet, files, rows, metadata = contents(out)
    expected_parquet, expected_files, expected_rows, expected_metadata = contents(tmp_path / "whole")
    assert (rows, metadata) == (expected_rows, expected_metadata)
    assert files == expected_files  # images and corpus.json, byte for byte; no journal is left
    assert parquet == expected_parquet


def test_a_long_document_continues_where_it_was(make_pdf, tmp_path):
    path = make_pdf(tmp_path / "long.pdf", [f"p{n}" for n in range(1, 161)], size=(600, 800))
    out = tmp_path / "corpus"
    process = start(path, out, "--workers", "1")
    deadline = time.monotonic() + 60
    while len(list(out.glob("journal/long.pdf-*/*.json"))) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = sorted(out.glob("journal/long.pdf-*/*.json"))
    assert 5 <= len(kept) < 160 / CHUNK_PAGES
    assert check_opens(out) == 0  # the document is not in the corpus before it is whole
    numbers = {int(entry.stem) + offset for entry in kept for offset in range(CHUNK_PAGES)}
    before = {image: image.stat().st_mtime_ns for image in out.glob("images/*/*.jpg")}
    assert ingest([path], out).pages == 160
    after = {image: image.stat().st_mtime_ns for image in out.glob("images/*/*.jpg")}
    rendered_again = {int(image.stem) for image in before if after[image] != before[image]}
    assert not numbers & rendered_again
    assert len(after) == 160
    assert not (out / "journal").exists()
    assert [page.text for page in Corpus.open(out).pages()] == [f"p{n}" for n in range(1, 161)]


def test_an_interrupted_ingest_saves_what_it_has(make_pdf, tmp_path):
    for number in range(8):
        texts = [f"{number} {n}" for n in range(24)]
        make_pdf(tmp_path / "docs" / f"n{number}.pdf", texts, size=(600, 800))
    out = tmp_path / "corpus"
    process = start(tmp_path / "docs", out, "--workers", "1")
    deadline = time.monotonic() + 60
    while len(list(out.glob("journal/*"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert 48 <= check_opens(out) < 8 * 24  # two documents are whole when the third has begun
    assert ingest([tmp_path / "docs"], out).pages == 8 * 24  # and no worker holds the lock


def test_a_journal_whose_images_are_lost_is_not_believed(make_pdf, tmp_path):
    path = make_pdf(tmp_path / "a.pdf", [f"p{n}" for n in range(1, 31)])
    out = tmp_path / "corpus"
    process = start(path, out, "--workers", "1")
    deadline = time.monotonic() + 60
    while not list(out.glob("journal/*/*.json")) and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    for entry in out.glob("journal/*/*.json"):
        entry.write_text(entry.read_text()[:100])
    for image in out.glob("images/*/0000*"):
        image.unlink()
    assert ingest([path], out).pages == 30
    assert check_opens(out) == 30


def test_the_manifest_is_written_again_after_a_kill_between_the_two_renames(docs, tmp_path):
    out = tmp_path / "corpus"
    ingest([docs / "n1.pdf"], out)
    manifest = (out / "corpus.json").read_bytes()
    ingest([docs / "n2.pdf"], out)
    (out / "corpus.json").write_bytes(manifest)  # as the kill would have left it
    assert set(Corpus.open(out).page_counts()) == {"n1.pdf", "n2.pdf"}
    ingest([docs / "n2.pdf"], out)
    assert b"n2.pdf" in (out / "corpus.json").read_bytes()


FULL_DISK = """
set -e
mount -t tmpfs -o size=500k tmpfs "$1"
set +e
"$2" -m visor.cli ingest "$3" -o "$1/corpus" --dpi 144 2>"$4/errors"
echo $? >"$4/code"
cp -r "$1/corpus" "$4/full"
mount -o remount,size=100m "$1"
"$2" -m visor.cli ingest "$3" -o "$1/corpus" --dpi 144 >"$4/output"
echo $? >>"$4/code"
cp -r "$1/corpus" "$4/after"
"""


def test_a_full_disk_is_reported_and_nothing_is_lost(make_pdf, tmp_path):
    unshare = shutil.which("unshare")
    works = unshare and subprocess.run([unshare, "-rm", "true"], capture_output=True, check=False)
    if not works or works.returncode:
        pytest.skip("a small file system needs `unshare -rm`")
    for number in range(8):
        make_pdf(tmp_path / "docs" / f"n{number}.pdf", [f"{n}" for n in range(8)], size=(600, 800))
    for folder in ("disk", "result"):
        (tmp_path / folder).mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [tmp_path / "disk", sys.executable, tmp_path / "docs", tmp_path / "result"]
    done = subprocess.run(
        [unshare, "-rm", "sh", "-c", FULL_DISK, "sh", *map(str, arguments)],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "result" / "code").read_text().split() == ["2", "0"]
    assert "is full; what was ingested so far is kept" in (tmp_path / "result" / "errors").read_text()
    check_opens(tmp_path / "result" / "full")
    assert "64 pages in the corpus" in (tmp_path / "result" / "output").read_text()
    assert check_opens(tmp_path / "result" / "after") == 64


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path):
    from visor.files import atomic_file

    path = tmp_path / "a.json"
    path.write_text("before")

    def write_half():
        with atomic_file(path) as temporary:
            temporary.write_text("half")
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        write_half()
    assert path.read_text() == "before"
    assert [file.name for file in Path(tmp_path).iterdir()] == ["a.json"]
