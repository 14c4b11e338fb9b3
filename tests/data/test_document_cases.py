"""Cases A1–A8 of documents that break other tools, each from the file to the corpus a user gets."""

import json
import resource
import subprocess
import sys
import unicodedata

import pytest

from data.corpus import Corpus, ingest
from visor.retrieval.index import build_index, open_index
from visor.types import split_page_id


@pytest.fixture
def good(make_pdf, tmp_path):
    return make_pdf(tmp_path / "good" / "good.pdf", ["a good page"])


def pages_of(corpus, doc_id):
    return [page for page in corpus.pages() if page.doc_id == doc_id]


def run_python(code, *arguments):
    """Run code in a process of its own; the JSON that it prints."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    return json.loads(done.stdout)


def test_a1_a_locked_pdf_is_named_and_an_owner_s_password_is_not_asked_for(cases, good, tmp_path):
    report = ingest([cases / "enc_owner_only.pdf", cases / "enc_user_pw.pdf", good], tmp_path / "c")
    assert report.new == ["enc_owner_only.pdf", "good.pdf"]
    reason = "enc_user_pw.pdf is password-protected; remove the password and ingest it again"
    assert report.failed == {"enc_user_pw.pdf": reason}
    assert f"failed: enc_user_pw.pdf: {reason}" in report.summary()
    corpus = Corpus.open(tmp_path / "c")
    assert len(pages_of(corpus, "enc_owner_only.pdf")) == 2
    assert pages_of(corpus, "enc_user_pw.pdf") == []
    build_index(corpus, tmp_path / "index", "bm25")
    hits = open_index(tmp_path / "index", corpus).search("good page encrypted secret 1 2", 10)
    assert {split_page_id(hit.page_id)[0] for hit in hits} <= {"enc_owner_only.pdf", "good.pdf"}


@pytest.mark.parametrize("order", [["zero_pages.pdf"], ["enc_user_pw.pdf", "zero_pages.pdf"]])
def test_a2_a_pdf_without_pages_is_an_error_whatever_came_before(cases, tmp_path, order):
    report = ingest([cases / name for name in order], tmp_path / "c", workers=1)
    assert report.failed["zero_pages.pdf"] == "zero_pages.pdf has no pages"
    assert set(report.failed) == set(order)
    assert not report.ok
    record = Corpus.open(tmp_path / "c").documents()[-1]
    assert (record.doc_id, record.status, record.reason) == (
        "zero_pages.pdf", "failed", "zero_pages.pdf has no pages"
    )  # fmt: skip
    again = ingest([cases / "zero_pages.pdf"], tmp_path / "c")
    assert (again.unchanged, list(again.failed)) == ([], ["zero_pages.pdf"])  # tried again, not done


def test_a3_rotation_is_applied(cases, tmp_path):
    ingest([cases / "rotate_mixed.pdf"], tmp_path / "c", dpi=144)
    corpus = Corpus.open(tmp_path / "c")
    sizes = [(page.width, page.height) for page in corpus.pages()]
    assert sizes == [(1224, 1584), (1584, 1224), (1584, 1224), (1224, 1584)]
    assert [page.text for page in corpus.pages()] == ["up", "rot90", "rot270", "rot180"]
    for page in corpus.pages():
        image = corpus.image(page.page_id)
        assert image.size == (page.width, page.height)
        red, blue = image.getpixel((5, 5)), image.getpixel((page.width - 6, page.height - 6))
        assert red[0] > 200 > 60 > max(red[1:])
        assert blue[2] > 200 > 60 > max(blue[:2])


HUGE = """
import json, resource, sys
from data.corpus import Corpus, ingest
report = ingest([sys.argv[1]], sys.argv[2], dpi=200, ocr="off")
sizes = [(page.width, page.height) for page in Corpus.open(sys.argv[2]).pages()]
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(json.dumps([report.notes, sizes, peak * 1024]))
"""


def test_a4_a_huge_page_keeps_within_the_cap_and_memory(cases, tmp_path):
    notes, (first, second), peak = run_python(HUGE, cases / "huge_page.pdf", tmp_path / "c")
    assert first[0] == first[1] > 3000
    assert abs(second[1] - 48 * second[0]) <= 48
    assert second[0] > 500
    assert all(width * height <= 12_845_056 for width, height in (first, second))
    assert len(notes) == 2
    assert all("dpi instead of 200 to stay within the pixel cap" in note for note in notes)
    assert peak < 500e6  # the naive picture has 1.6e9 pixels
    image = Corpus.open(tmp_path / "c").image("huge_page.pdf#page=2")
    assert image.getpixel((2, 2))[0] > 200
    assert image.getpixel((image.width - 3, image.height - 3))[2] > 200


def test_a5_cmyk_and_a_damaged_profile(cases, tmp_path):
    ingest([cases / "cmyk_icc.pdf"], tmp_path / "c")
    corpus = Corpus.open(tmp_path / "c")
    first, second = (corpus.image(page.page_id) for page in corpus.pages())
    assert first.mode == second.mode == "RGB"
    x, y = first.width // 4, first.height // 4
    cyan, magenta = first.getpixel((x, y)), first.getpixel((3 * x, y))
    yellow, dark = first.getpixel((x, 3 * y)), first.getpixel((3 * x, 3 * y))
    assert cyan[0] < 100 < 150 < cyan[2]
    assert magenta[1] < 100 < 150 < magenta[0]
    assert yellow[2] < 100
    assert yellow[0] > 200
    assert yellow[1] > 180
    assert max(dark) < 80
    top, bottom = (second.getpixel((second.width // 2, k * second.height // 4)) for k in (1, 3))
    assert top[0] > 200 > 60 > top[2]
    assert bottom[2] > 200 > 60 > bottom[0]


def test_a6_bad_files_in_a_folder_do_not_end_the_batch(cases, good, tmp_path):
    folder = tmp_path / "mixed"
    folder.mkdir()
    for name in ("broken_xref.pdf", "html_named.pdf", "empty_0_bytes.pdf"):
        (folder / name).write_bytes((cases / name).read_bytes())
    (folder / "good.pdf").write_bytes(good.read_bytes())
    report = ingest([folder], tmp_path / "c")
    assert report.new == ["broken_xref.pdf", "good.pdf"]
    assert report.failed == {
        "empty_0_bytes.pdf": "empty_0_bytes.pdf is not a PDF: the file is empty",
        "html_named.pdf": "html_named.pdf is not a PDF (it does not start like one)",
    }
    lines = report.summary().splitlines()
    assert lines[0].startswith("2 ingested, 0 unchanged, 0 removed, 2 failed; 3 pages in the corpus")
    assert lines[1:] == [f"failed: {name}: {reason}" for name, reason in report.failed.items()]
    texts = [page.text for page in pages_of(Corpus.open(tmp_path / "c"), "broken_xref.pdf")]
    assert texts == ["Page 1", "Page 2"]


PEAKS = """
import json, resource, sys
from data.corpus import ingest
report = ingest([sys.argv[1]], sys.argv[2], dpi=60, workers=2)
peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(json.dumps([report.pages, *peaks]))
"""


def test_a7_many_pages_in_order_with_no_more_memory_than_few(cases, make_pdf, tmp_path):
    few = make_pdf(tmp_path / "few.pdf", [f"P{n}" for n in range(1, 101)], size=(612, 792))
    few_pages, *few_peaks = run_python(PEAKS, few, tmp_path / "few")
    many_pages, *many_peaks = run_python(PEAKS, cases / "pages_1205.pdf", tmp_path / "many")
    assert (few_pages, many_pages) == (100, 1205)
    for few_peak, many_peak in zip(few_peaks, many_peaks):
        assert many_peak < 1.3 * few_peak + 20_000  # KiB
    corpus = Corpus.open(tmp_path / "many")
    pages = corpus.pages()
    assert [page.page_number for page in pages] == list(range(1, 1206))
    assert [page.text for page in pages] == [f"P{number}" for number in range(1, 1206)]
    assert [page.image for page in pages] == sorted(page.image for page in pages)
    build_index(corpus, tmp_path / "index", "bm25")
    retriever = open_index(tmp_path / "index", corpus)
    assert [hit.page_id for hit in retriever.search("P1000", 5)] == ["pages_1205.pdf#page=1000"]
    assert [split_page_id(page_id)[1] for page_id in retriever._pages.page_ids] == list(range(1, 1206))


def test_a8_names_that_collide_elsewhere(cases, tmp_path):
    report = ingest([cases / "names"], tmp_path / "c", dpi=30)
    assert (len(report.new), report.failed, report.pages) == (7, {}, 11)
    corpus = Corpus.open(tmp_path / "c")
    names = sorted(unicodedata.normalize("NFC", path.name) for path in (cases / "names").iterdir())
    assert sorted(document.doc_id for document in corpus.documents()) == names
    assert "SCAN.PDF" in names
    assert any(set(" #%") & set(name) for name in names)
    page_ids = [page.page_id for page in corpus.pages()]
    assert len(set(page_ids)) == 11
    for page in corpus.pages():
        assert split_page_id(page.page_id) == (page.doc_id, page.page_number)
        for form in ("NFC", "NFD"):
            spelled = unicodedata.normalize(form, page.page_id)
            assert corpus.page(spelled) == page
            assert corpus.image(spelled).size == (page.width, page.height)
            assert corpus.document_path(unicodedata.normalize(form, page.doc_id)).is_file()


def test_the_peak_of_this_process_is_not_what_is_measured():
    """Guards the unit: ru_maxrss is KiB on Linux, where these bounds are checked."""
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 10_000
