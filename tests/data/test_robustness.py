"""Documents made to break things never end a batch, hang it, or take the machine's memory."""

import random
import threading
import zlib
from pathlib import Path

import pytest

from data.corpus import Corpus, ingest
from data.render import RenderSettings, render_document

SAMPLE = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "mmlongbench" / "documents"


def pdf_of(*objects):
    """A PDF of these objects, the first of which is the catalog."""
    data, offsets = bytearray(b"%PDF-1.7\n"), []
    for number, content in enumerate(objects, 1):
        offsets.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    size, start = len(objects) + 1, len(data)
    data += b"xref\n0 %d\n0000000000 65535 f \n%s" % (size, table)
    return bytes(data + b"trailer <</Size %d /Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (size, start))


def stream(entries, content):
    return b"<<%s /Length %d>>\nstream\n%s\nendstream" % (entries, len(content), content)


CATALOG = b"<</Type /Catalog /Pages 2 0 R>>"
ONE_PAGE = b"<</Type /Pages /Kids [3 0 R] /Count 1>>"


def never_ending():
    """Forms that draw each other ten times, nine levels deep: a billion drawings."""
    page = b"<</Type /Page /Parent 2 0 R /MediaBox [0 0 600 800] /Contents 4 0 R /Resources %s>>"
    names = b"<</XObject <</F %d 0 R>>>>"
    form = b"/Type /XObject /Subtype /Form /BBox [0 0 600 800] /Resources " + names
    levels = [stream(form % (number + 1), b"/F Do " * 10) for number in range(5, 13)]
    last = stream(form % 13, b"0 0 m 600 800 l 300 0 l f " * 5)
    return pdf_of(CATALOG, ONE_PAGE, page % (names % 5), stream(b"", b"/F Do "), *levels, last)


def memory_bomb():
    """300 MB of drawing commands in 300 kB; PDFium keeps every one of them."""
    content = zlib.compress(b"0 0 m 1 1 l S " * 60_000_000, 9)
    page = b"<</Type /Page /Parent 2 0 R /MediaBox [0 0 600 800] /Contents 4 0 R>>"
    return pdf_of(CATALOG, ONE_PAGE, page, stream(b"/Filter /FlateDecode", content))


def million_pages():
    """One page, and a page tree that claims a million, in a file large enough for them."""
    page = b"<</Type /Page /Parent 2 0 R /MediaBox [0 0 60 80]>>"
    return pdf_of(CATALOG, b"<</Type /Pages /Kids [3 0 R] /Count 1000000>>", page) + b" " * 9_000_000


def test_a_page_that_never_ends_is_given_up_and_the_others_go_on(make_pdf, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "hangs.pdf").write_bytes(never_ending())
    make_pdf(tmp_path / "docs" / "a.pdf", ["a"])
    make_pdf(tmp_path / "docs" / "z.pdf", ["z"])
    for workers in (1, 2):
        out = tmp_path / f"corpus {workers}"
        report = ingest([tmp_path / "docs"], out, workers=workers, time_limit=3)
        assert report.new == ["a.pdf", "z.pdf"]
        assert report.failed == {"hangs.pdf": "hangs.pdf, pages 1-8: took longer than 3 s"}


def test_a_pdf_that_claims_a_million_pages_is_given_up(tmp_path):
    (tmp_path / "many.pdf").write_bytes(million_pages())
    (tmp_path / "small.pdf").write_bytes(million_pages().rstrip())
    report = ingest([tmp_path / "many.pdf", tmp_path / "small.pdf"], tmp_path / "corpus")
    assert "many.pdf is damaged: it claims 1000000 pages, and nearly none can be" in report.failed["many.pdf"]
    assert "small.pdf is damaged: it claims 1000000 pages, more than" in report.failed["small.pdf"]


@pytest.mark.slow
def test_a_page_that_takes_all_memory_fails_alone(make_pdf, tmp_path):
    (tmp_path / "bomb.pdf").write_bytes(memory_bomb())
    good = make_pdf(tmp_path / "good.pdf", ["good"])
    report = ingest([tmp_path / "bomb.pdf", good], tmp_path / "corpus", workers=2, time_limit=60)
    assert report.new == ["good.pdf"]
    assert list(report.failed) == ["bomb.pdf"]


def mutant(data, rng):
    """A damaged copy: cut off, bytes or digits (lengths, offsets, counts) changed, or a part missing."""
    data = bytearray(data)
    kind = rng.choice(["cut off", "bytes", "digits", "missing"])
    if kind == "cut off":
        return bytes(data[: rng.randrange(len(data))])
    if kind == "missing":
        start = rng.randrange(len(data))
        del data[start : start + rng.randrange(1, 2000)]
        return bytes(data)
    digits = [place for place, byte in enumerate(data) if 48 <= byte <= 57]
    for _ in range(rng.choice([1, 10, 100])):
        if kind == "digits":
            data[rng.choice(digits)] = rng.choice(b"0123456789")
        else:
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def check_mutants(originals, count, tmp_path):
    rng = random.Random(0)
    (tmp_path / "docs").mkdir()
    for number in range(count):
        damaged = mutant(rng.choice(originals), rng)
        (tmp_path / "docs" / f"{number:03}.pdf").write_bytes(damaged)
    report = ingest([tmp_path / "docs"], tmp_path / "corpus", dpi=20, ocr="off", time_limit=60)
    assert len(report.new) + len(report.failed) == count
    assert not any("took longer" in reason for reason in report.failed.values())
    assert all(name in reason for name, reason in report.failed.items())
    corpus = Corpus.open(tmp_path / "corpus")
    corpus.check_images()
    for page in corpus.pages()[::50]:
        assert corpus.image(page.page_id).size == (page.width, page.height)
    left_out = {page.doc_id for page in corpus.pages()}
    assert left_out == set(report.new)
    return report


def test_damaged_copies_of_small_pdfs_never_end_the_batch(cases, make_pdf, tmp_path):
    names = ["enc_owner_only.pdf", "rotate_mixed.pdf", "huge_page.pdf", "cmyk_icc.pdf", "broken_xref.pdf"]
    originals = [(cases / name).read_bytes() for name in names]
    originals.append(make_pdf(tmp_path / "a.pdf", list("abcdef")).read_bytes())
    report = check_mutants(originals, 60, tmp_path)
    assert report.new
    assert report.failed


@pytest.mark.slow
def test_damaged_copies_of_real_pdfs_never_end_the_batch(tmp_path):
    if not SAMPLE.is_dir():
        pytest.skip("the sample of MMLongBench-Doc is not beside the project")
    originals = [path.read_bytes() for path in sorted(SAMPLE.glob("*.pdf"))]
    report = check_mutants(originals, 200, tmp_path)
    assert len(report.new) > 20
    assert len(report.failed) > 20


# ---------------------------------------------------------------- threads (F6)


def test_f6_threads_that_render_different_pdfs_at_once(make_pdf, tmp_path):
    """PDFium would crash; the lock makes them take turns, and each gets its own text."""
    results, errors = {}, []
    start = threading.Barrier(3)

    def render(name):
        try:
            path = make_pdf(tmp_path / f"{name}.pdf", [f"{name} {n}" for n in range(40)], size=(300, 400))
            (tmp_path / name).mkdir()
            start.wait()
            for first in (1, 21):
                done = render_document(path, tmp_path / name, RenderSettings(dpi=72), first, 20)
                results.setdefault(name, []).extend(page.text for page in done.pages)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=render, args=(name,)) for name in ("red", "green", "blue")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert results == {name: [f"{name} {n}" for n in range(40)] for name in ("red", "green", "blue")}


def test_f6_ingests_in_threads(make_pdf, tmp_path):
    paths = [make_pdf(tmp_path / f"{name}.pdf", [f"{name} {n}" for n in range(20)]) for name in "abc"]
    threads = [threading.Thread(target=ingest, args=([path], tmp_path / path.stem)) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for path in paths:
        texts = [page.text for page in Corpus.open(tmp_path / path.stem).pages()]
        assert texts == [f"{path.stem} {n}" for n in range(20)]
