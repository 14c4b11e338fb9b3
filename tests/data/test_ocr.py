"""Pages without a text layer are read by the real engine; its lines are put into reading order."""

import json
import subprocess
import sys
from itertools import pairwise

import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageDraw, ImageFont

from data import corpus_files
from data.corpus import Corpus, ingest
from data.ocr import read_image, tiles_of
from data.reading_order import Line, reading_text, rows_of
from visor.cli import main
from visor.types import Page

pytest.importorskip("rapidocr", reason="needs the extra ocr")


def scan(path, lines, size=(640, 280)):
    """A picture of lines of text, as a scanner makes it."""
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    for number, text in enumerate(lines):
        draw.text((30, 30 + 70 * number), text, fill="black", font=ImageFont.load_default(34))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
    return path


@pytest.fixture
def docs(make_pdf, tmp_path):
    """A PDF of a page with text and a scanned one, a scanned image, its copy, and a blank image."""
    from reportlab.pdfgen.canvas import Canvas

    picture = scan(tmp_path / "picture.png", ["Invoice number 4711", "Total amount 982 dollars"])
    (tmp_path / "docs").mkdir()
    canvas = Canvas(str(tmp_path / "docs" / "mixed.pdf"), pagesize=(320, 140), invariant=True)
    canvas.drawString(10, 50, "a text layer")
    canvas.showPage()
    canvas.drawImage(str(picture), 0, 0, 320, 140)
    canvas.showPage()
    canvas.save()
    for name in ("copy.png", "scan.png"):
        scan(tmp_path / "docs" / name, ["The harbour of Lisbon"], (560, 120))
    Image.new("RGB", (300, 200), "white").save(tmp_path / "docs" / "blank.png")
    return tmp_path / "docs"


def test_pages_without_text_are_read_and_marked_once(docs, tmp_path, capsys):
    out = tmp_path / "corpus"
    off = ingest([docs], out, ocr="off")
    assert (off.read, off.pages_without_text, off.pages_not_read) == (0, 4, 4)
    assert "4 pages have no text; text retrieval cannot find them (4 were not read" in off.summary()
    images = {path: path.stat().st_mtime_ns for path in out.rglob("images/*/*")}

    # Turned on later: nothing is rendered again; two pages with the same picture are read once.
    assert main(["ingest", str(docs), "-o", str(out), "--ocr", "on", "--workers", "1"]) == 0
    captured = capsys.readouterr()
    assert "0 ingested, 4 unchanged" in captured.out
    assert "4 pages read by OCR\n" in captured.out
    assert "note: 1 page has no text; text retrieval cannot find it\n" in captured.out
    assert "pages read by OCR: 4 of 4" in captured.err
    assert {path: path.stat().st_mtime_ns for path in out.rglob("images/*/*")} == images
    pages = {page.page_id: page for page in Corpus.open(out).pages()}
    sources = {page_id: page.text_source for page_id, page in pages.items()}
    assert sources == {
        "blank.png#page=1": "ocr",
        "copy.png#page=1": "ocr",
        "mixed.pdf#page=1": "layer",
        "mixed.pdf#page=2": "ocr",
        "scan.png#page=1": "ocr",
    }
    assert pages["mixed.pdf#page=2"].text == "Invoice number 4711\nTotal amount 982 dollars"
    assert pages["scan.png#page=1"].text == pages["copy.png#page=1"].text == "The harbour of Lisbon"
    assert pages["blank.png#page=1"].text == ""
    manifest = json.loads((out / "corpus.json").read_text())
    assert manifest["totals"] == {"pages": 5, "pages_without_text": 1, "pages_read_by_ocr": 4}
    engines = {document["doc_id"]: document["ocr"].split()[0] for document in manifest["documents"]}
    assert set(engines.values()) == {"rapidocr"}

    # Read pages are not read again, and keep their text when OCR is off.
    for mode in ("auto", "on", "off"):
        again = ingest([docs], out, ocr=mode)
        assert (again.read, len(again.unchanged)) == (0, 4)
    assert {page.page_id: page for page in Corpus.open(out).pages()} == pages

    # A new document with a known picture takes its text from the corpus.
    (docs / "third.png").write_bytes((docs / "scan.png").read_bytes())
    assert ingest([docs], out).read == 0
    assert Corpus.open(out).page("third.png#page=1").text == "The harbour of Lisbon"


def test_texts_read_before_a_kill_are_kept(docs, tmp_path):
    out = tmp_path / "corpus"
    ingest([docs], out, ocr="off")
    from data.corpus_writer import CorpusWriter
    from data.ocr import ocr_version
    from data.ocr_stage import OCR_JOURNAL

    journal = out / corpus_files.JOURNAL_FOLDER / OCR_JOURNAL
    journal.parent.mkdir()
    known = CorpusWriter(out).pages["scan.png#page=1"].sha256
    entries = [
        {"sha256": known, "ocr": ocr_version(), "text": "kept"},
        {"sha256": known, "ocr": "another engine", "text": "of another version"},
    ]
    torn = '{"sha256": "12'
    journal.write_text("".join(json.dumps(entry) + "\n" for entry in entries) + torn)
    assert ingest([docs], out).read == 2
    assert Corpus.open(out).page("scan.png#page=1").text == "kept"
    assert Corpus.open(out).page("mixed.pdf#page=2").text.startswith("Invoice")
    assert not journal.exists()


def test_an_image_lost_before_it_was_read_is_named(docs, tmp_path):
    from data.corpus_writer import CorpusWriter
    from data.ingest_report import IngestReport
    from data.ocr import ocr_version
    from data.ocr_stage import read_pages
    from data.workers import WorkerPool

    ingest([docs], tmp_path / "corpus", ocr="off")
    corpus, report = CorpusWriter(tmp_path / "corpus"), IngestReport()
    (corpus.folder / corpus.pages["scan.png#page=1"].image).unlink()
    with WorkerPool(1) as pool:
        read_pages(corpus, {"scan.png", "blank.png"}, ocr_version(), pool, report)
    assert report.read == 1
    assert len(report.notes) == 1
    assert report.notes[0].startswith("scan.png#page=1: OCR failed: ")
    assert corpus.pages["scan.png#page=1"].text_source == "none"


def test_without_the_extra_on_is_refused_and_auto_says_what_to_install(docs, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    assert main(["ingest", str(docs), "-o", str(tmp_path / "corpus"), "--ocr", "on"]) == 2
    assert "pip install 'visor-rag[ocr]'" in capsys.readouterr().err
    report = ingest([docs], tmp_path / "corpus")
    assert report.pages_not_read == 4
    assert "extra `ocr`" in report.summary()


def test_the_parent_never_loads_the_engine(docs, tmp_path):
    code = """
import sys
from data.corpus import ingest
ingest([sys.argv[1]], sys.argv[2], ocr="on")
assert not {"rapidocr", "onnxruntime", "cv2"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, docs / "scan.png", tmp_path / "corpus"], check=True)


@pytest.mark.parametrize("size", [(500, 1800), (1190, 1684), (517, 24800), (24800, 517), (28, 5600), (1, 1)])
def test_tiles_cover_an_image_once_and_are_not_long(size):
    width, height = size
    tiles = tiles_of(width, height)
    assert sum((tile.own[2] - tile.own[0]) * (tile.own[3] - tile.own[1]) for tile in tiles) == width * height
    for tile, after in pairwise(tiles):
        assert tile.own[:2] != after.own[:2]
        assert tile.box[2] > after.box[0]
        assert tile.box[3] > after.box[1]
    for tile in tiles:
        part = (tile.box[2] - tile.box[0], tile.box[3] - tile.box[1])
        assert len(tiles) == 1 or max(part) <= 4 * min(part)
    assert (len(tiles) > 1) == (max(size) > 2000)


def test_a_long_strip_is_read_to_its_end_each_line_once(tmp_path):
    image = Image.new("RGB", (300, 2400), "white")
    draw = ImageDraw.Draw(image)
    words = ["alpha", "bravo", "castle", "delta", "engine", "forest", "garden", "harbour"]
    for number, word in enumerate(words):
        draw.text((40, 60 + 295 * number), word, fill="black", font=ImageFont.load_default(48))
    assert read_image(image).split() == words


# ---------------------------------------------------------------- corpora of other versions


def test_a_corpus_from_before_the_source_of_texts_was_kept_opens(docs, tmp_path):
    out = tmp_path / "corpus"
    ingest([docs], out, ocr="off")
    table = pq.read_table(out / "pages.parquet")
    raw = json.loads(table.schema.metadata[b"visor_corpus"])
    del raw["totals"]
    for document in raw["documents"]:
        del document["ocr"]
    old = table.drop_columns(["text_source"]).replace_schema_metadata({b"visor_corpus": json.dumps(raw)})
    pq.write_table(old, out / "pages.parquet")
    sources = {page.page_id: page.text_source for page in Corpus.open(out).pages()}
    assert [page_id for page_id, source in sources.items() if source == "layer"] == ["mixed.pdf#page=1"]
    report = ingest([docs / "scan.png"], out, ocr="on")
    assert (report.unchanged, report.read) == (["scan.png"], 1)


def test_a_corpus_of_a_newer_version_is_refused_in_words(docs, tmp_path):
    out = tmp_path / "corpus"
    ingest([docs / "blank.png"], out, ocr="off")
    table = pq.read_table(out / "pages.parquet")
    pq.write_table(table.append_column("mood", [["good"]]), out / "pages.parquet")
    with pytest.raises(ValueError, match=r"pages\.parquet was written by another version .*mood"):
        Corpus.open(out)


def test_a_page_made_in_code_says_where_its_text_is_from():
    fields = {"page_id": "d#page=1", "doc_id": "d", "page_number": 1, "image": "", "width": 1, "height": 1}
    assert Page(**fields).text_source == "none"
    assert Page(**fields, text="x").text_source == "layer"
    assert Page(**fields, text="x", text_source="ocr").text_source == "ocr"


# ---------------------------------------------------------------- reading order


def column(left, right, texts, top=100.0, step=20.0):
    boxes = enumerate(texts)
    return [Line(left, top + step * n, right, top + step * n + 15, text) for n, text in boxes]


def test_columns_are_read_one_after_the_other_between_lines_that_span_them():
    lines = [
        Line(20, 40, 580, 60, "A title over both columns"),
        *column(20, 285, ["left one", "left two", "left three", "left four"]),
        *column(315, 580, ["right one", "right two", "right three", "right four"]),
        Line(20, 300, 580, 315, "A line that spans both"),
        *column(20, 285, ["left five", "left six", "left seven"], 330),
        *column(315, 580, ["right five", "right six", "right seven"], 330),
    ]
    expected = ["A title over both columns"]
    expected += [f"{side} {n}" for side in ("left", "right") for n in ("one", "two", "three", "four")]
    expected += ["A line that spans both"]
    expected += [f"{side} {n}" for side in ("left", "right") for n in ("five", "six", "seven")]
    for shuffled in (lines, lines[::-1], sorted(lines, key=lambda line: line.text)):
        assert reading_text(shuffled).splitlines() == expected


def test_three_columns_and_ragged_text_below():
    lines = [
        line for n, x in enumerate((0, 210, 420)) for line in column(x, x + 190, [f"{n}a", f"{n}b", f"{n}c"])
    ]
    lines += column(0, 560, ["ragged and long"], 200) + column(0, 400, ["ragged", "end"], 220)
    assert reading_text(lines).split("\n") == [
        *(f"{n}{letter}" for n in range(3) for letter in "abc"), "ragged and long", "ragged", "end"
    ]  # fmt: skip


def test_a_table_is_read_row_by_row():
    lines = [
        Line(x, 100 + 20 * row, x + width, 115 + 20 * row, f"{name}{row}")
        for row in range(6)
        for x, width, name in ((20, 150 + 20 * (row % 3), "label"), (400, 40, "x"), (500, 40, "y"))
    ]
    assert reading_text(lines).splitlines() == [f"label{row} x{row} y{row}" for row in range(6)]


def test_rows_stand_a_little_skew():
    lines = [Line(0, 10, 90, 30, "a"), Line(100, 13, 190, 33, "b"), Line(0, 34, 90, 54, "c")]
    assert [[line.text for line in row] for row in rows_of(lines[::-1])] == [["a", "b"], ["c"]]


def test_hyphens_at_line_ends_are_joined_and_vertical_text_comes_last():
    lines = [
        *column(50, 300, ["the decom-", "position of X-", "Ray 10-", "20"]),
        Line(0, 0, 20, 400, "arXiv"),
    ]
    assert reading_text(lines) == "the decomposition of X-\nRay 10-\n20\narXiv"
    assert reading_text([]) == ""
