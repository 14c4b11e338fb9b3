import io
import json
import os
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from PIL import Image

from data.corpus import Corpus, ingest, remove_documents
from data.corpus_files import read_corpus
from data.corpus_writer import CorpusWriter
from data.page_images import PageImages
from data.pdf import open_pdf, read_page
from data.progress import ProgressBar
from data.sources import assign_ids, find_sources
from visor.cli import main
from visor.types import Page, split_page_id

SAMPLE = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "mmlongbench" / "documents"


@pytest.fixture
def docs(make_pdf, tmp_path):
    make_pdf(tmp_path / "docs" / "b.pdf", ["b one", "b two"])
    make_pdf(tmp_path / "docs" / "sub" / "a.pdf", [f"a {n}" for n in range(1, 13)])
    return tmp_path / "docs"


def ids(corpus):
    return [page.page_id for page in corpus.pages()]


def test_pages_documents_and_images(docs, tmp_path):
    report = ingest([docs], tmp_path / "corpus", dpi=72)
    assert (report.new, report.failed, report.pages, report.ok) == (["b.pdf", "sub/a.pdf"], {}, 14, True)
    corpus = Corpus.open(tmp_path / "corpus")
    expected = ["b.pdf#page=1", "b.pdf#page=2"] + [f"sub/a.pdf#page={n}" for n in range(1, 13)]
    assert ids(corpus) == expected
    page = corpus.page("sub/a.pdf#page=10")
    assert (page.text, page.doc_id, page.page_number, page.width) == ("a 10", "sub/a.pdf", 10, 100)
    image = corpus.image(page.page_id)
    assert (image.mode, image.size) == ("RGB", (100, 140))
    assert corpus.document_path("sub/a.pdf") == docs / "sub" / "a.pdf"
    assert corpus.document_path("other.pdf") is None
    assert corpus.page_counts() == {"b.pdf": 2, "sub/a.pdf": 12}
    with pytest.raises(ValueError, match=r"no page 'b\.pdf#page=3'"):
        corpus.page("b.pdf#page=3")


def test_files_can_be_read_by_others(docs, tmp_path):
    from datasets import load_dataset

    ingest([docs], tmp_path / "corpus")
    manifest = json.loads((tmp_path / "corpus" / "corpus.json").read_text())
    assert manifest["schema_version"] == 1
    assert manifest["totals"] == {"pages": 14, "pages_without_text": 0, "pages_read_by_ocr": 0}
    assert [(d["doc_id"], d["status"], d["page_count"]) for d in manifest["documents"]] == [
        ("b.pdf", "done", 2),
        ("sub/a.pdf", "done", 12),
    ]
    rows = load_dataset(
        "parquet",
        data_files=str(tmp_path / "corpus" / "pages.parquet"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    assert rows.column_names == list(Page.model_fields)
    assert rows[3] == Corpus.open(tmp_path / "corpus").page("sub/a.pdf#page=2").model_dump()


def test_workers_give_the_same_corpus(docs, make_pdf, tmp_path):
    make_pdf(docs / "long.pdf", [f"p{n}" for n in range(1, 41)])
    (docs / "bad.pdf").write_text("no")
    for name, workers in (("one", 1), ("two", 2)):
        ingest([docs], tmp_path / name, workers=workers)
    assert read_corpus(tmp_path / "one") == read_corpus(tmp_path / "two")
    corpus = Corpus.open(tmp_path / "two")
    assert [p.text for p in corpus.pages() if p.doc_id == "long.pdf"] == [f"p{n}" for n in range(1, 41)]


def test_only_new_and_changed_documents_are_rendered(docs, make_pdf, tmp_path):
    out = tmp_path / "corpus"
    ingest([docs], out)
    make_pdf(docs / "b.pdf", ["b three"])
    make_pdf(docs / "c.pdf", ["c"])
    report = ingest([docs], out)
    assert (report.new, report.unchanged) == (["b.pdf", "c.pdf"], ["sub/a.pdf"])
    corpus = Corpus.open(out)
    assert [p.text for p in corpus.pages() if p.doc_id == "b.pdf"] == ["b three"]
    assert len(list((out / "images").iterdir())) == 3
    assert all((out / page.image).is_file() for page in corpus.pages())
    assert ingest([docs], out, dpi=100).new == ["b.pdf", "c.pdf", "sub/a.pdf"]
    assert ingest([docs], out, dpi=100).new == []


def test_lost_images_are_named_without_opening_any(docs, tmp_path):
    ingest([docs], tmp_path / "c")
    corpus = Corpus.open(tmp_path / "c")
    assert corpus.missing_images() == []
    corpus.check_images()
    images = [page.image for page in corpus.pages()]
    (tmp_path / "c" / images[1]).unlink()
    assert corpus.missing_images() == [images[1]]
    shutil.rmtree((tmp_path / "c" / images[0]).parent)
    folder = images[0].rpartition("/")[0]
    lost = [image for image in images if image.startswith(folder)]
    assert corpus.missing_images() == lost
    with pytest.raises(ValueError, match=rf"lacks {len(lost)} of its {len(images)} page images .*ingest"):
        corpus.check_images()


def test_a_lost_image_is_rendered_again(docs, tmp_path):
    out = tmp_path / "corpus"
    ingest([docs], out)
    (out / Corpus.open(out).page("b.pdf#page=2").image).unlink()
    with pytest.raises(ValueError, match=r"b\.pdf#page=2"):
        Corpus.open(out).image("b.pdf#page=2")
    assert ingest([docs], out).new == ["b.pdf"]
    Corpus.open(out).image("b.pdf#page=2")


def test_a_page_that_looks_the_same_keeps_its_caption(docs, make_pdf, tmp_path):
    out = tmp_path / "corpus"
    ingest([docs], out)
    corpus = CorpusWriter(out)
    for page_id, page in corpus.pages.items():
        corpus.pages[page_id] = page.model_copy(update={"caption": f"shows {page.text}"})
    corpus.save()
    make_pdf(docs / "b.pdf", ["b three", "b two"])
    ingest([docs], out)
    captions = {page.page_id: page.caption for page in Corpus.open(out).pages() if page.doc_id == "b.pdf"}
    assert captions == {"b.pdf#page=1": "", "b.pdf#page=2": "shows b two"}


def test_removed_documents_lose_their_pages_and_others_stay(docs, make_pdf, tmp_path):
    out = tmp_path / "corpus"
    other = make_pdf(tmp_path / "other" / "o.pdf", ["o"])
    ingest([docs], out)
    ingest([other], out)
    (docs / "b.pdf").unlink()
    other.unlink()
    report = ingest([docs], out)
    assert report.removed == ["b.pdf"]
    assert {split_page_id(i)[0] for i in ids(Corpus.open(out))} == {"o.pdf", "sub/a.pdf"}
    assert len(list((out / "images").iterdir())) == 2


def test_failures_are_recorded_named_and_retried(docs, make_pdf, tmp_path):
    (docs / "page.pdf").write_text("<html>")
    (docs / "empty.pdf").write_bytes(b"")
    report = ingest([docs], tmp_path / "corpus")
    assert set(report.failed) == {"page.pdf", "empty.pdf"}
    assert "page.pdf is not a PDF" in report.summary()
    assert report.ok
    corpus = Corpus.open(tmp_path / "corpus")
    states = {d.doc_id: (d.status, d.page_count) for d in corpus.documents()}
    assert states["page.pdf"] == ("failed", 0)
    assert states["b.pdf"] == ("done", 2)
    make_pdf(docs / "page.pdf", ["now good"])
    assert ingest([docs], tmp_path / "corpus").new == ["page.pdf"]


def test_a_document_that_turns_bad_loses_its_pages(docs, tmp_path):
    ingest([docs], tmp_path / "corpus")
    (docs / "b.pdf").write_bytes(b"%PDF-1.4 cut off")
    report = ingest([docs], tmp_path / "corpus")
    assert list(report.failed) == ["b.pdf"]
    assert all(page.doc_id != "b.pdf" for page in Corpus.open(tmp_path / "corpus").pages())


def test_nothing_ingested_is_not_ok(tmp_path):
    (tmp_path / "x.pdf").write_bytes(b"")
    report = ingest([tmp_path / "x.pdf"], tmp_path / "corpus")
    assert not report.ok
    assert Corpus.open(tmp_path / "corpus").pages() == []


def test_useless_input_is_refused(tmp_path):
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"no PDF or image found in .*none"):
        ingest([tmp_path / "none"], tmp_path / "corpus")
    with pytest.raises(ValueError, match="missing: no such file or folder"):
        ingest([tmp_path / "missing"], tmp_path / "corpus")
    with pytest.raises(ValueError, match="is not a corpus"):
        Corpus.open(tmp_path / "none")
    (tmp_path / "none" / "pages.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="damaged"):
        Corpus.open(tmp_path / "none")


def test_images_are_documents(tmp_path):
    (tmp_path / "docs").mkdir()
    Image.new("RGB", (300, 200), "red").save(tmp_path / "docs" / "deck_1.jpg")
    Image.new("RGB", (300, 200), "blue").save(tmp_path / "docs" / "deck_10.PNG")
    report = ingest([tmp_path / "docs"], tmp_path / "corpus")
    corpus = Corpus.open(tmp_path / "corpus")
    assert ids(corpus) == ["deck_1.jpg#page=1", "deck_10.PNG#page=1"]
    assert corpus.image("deck_10.PNG#page=1").getpixel((0, 0)) == (0, 0, 255)
    assert report.pages_without_text == 2


def test_the_corpus_itself_is_not_ingested(docs):
    Image.new("RGB", (300, 200)).save(docs / "x.png")
    assert ingest([docs], docs / "corpus").pages == 15
    assert ingest([docs], docs / "corpus").pages == 15


def test_other_corpora_below_a_source_are_not_ingested(docs, tmp_path):
    Image.new("RGB", (300, 200)).save(docs / "x.png")
    ingest([docs], docs / "old")
    assert ingest([docs], tmp_path / "new").new == ["b.pdf", "sub/a.pdf", "x.png"]
    with pytest.raises(ValueError, match=r"old is a corpus .*not documents"):
        ingest([docs / "old"], tmp_path / "new")


def test_output_that_is_a_source_folder_is_refused(docs, tmp_path):
    (tmp_path / "link").symlink_to(docs)
    for output in (docs, docs / "sub" / "..", tmp_path / "link"):
        with pytest.raises(ValueError, match="both the folder of the documents and the output"):
            ingest([docs], output)
    assert sorted(path.name for path in docs.iterdir()) == ["b.pdf", "sub"]


def test_the_folders_of_the_output_are_refused_as_sources(docs, tmp_path):
    out = tmp_path / "corpus"
    ingest([docs], out)
    (tmp_path / "link").symlink_to(out / "images")
    image = next((out / "images").rglob("*.png"))
    for given in (out / "images", tmp_path / "link", image.parent, image):
        with pytest.raises(ValueError, match=r"lies in the output .* itself"):
            ingest([given], out)
    assert len(Corpus.open(out).pages()) == 14


def test_only_regular_files_are_documents(docs, tmp_path):
    out = tmp_path / "corpus"
    ingest([docs], out)
    (docs / "b.pdf").unlink()
    for name in ("b.pdf", "pipe.pdf"):
        os.mkfifo(docs / name)
    os.mkfifo(tmp_path / "named")
    report = ingest([docs, tmp_path / "named"], out)
    names = ["b.pdf", "named", "pipe.pdf"]
    assert report.failed == {name: f"{name} is not a regular file" for name in names}
    assert report.unchanged == ["sub/a.pdf"]
    assert Corpus.open(out).page_counts() == {"b.pdf": 2, "sub/a.pdf": 12}


def test_a_folder_without_any_of_its_documents_changes_nothing_and_says_so(docs, tmp_path, capsys):
    out = tmp_path / "corpus"
    ingest([docs], out)
    shutil.rmtree(docs)
    docs.mkdir()
    assert main(["ingest", str(docs), "-o", str(out)]) == 2
    printed = capsys.readouterr().err
    assert f"no PDF or image found in {docs}; corpus {out} keeps" in printed
    assert "(b.pdf, sub/a.pdf)" in printed
    assert "--remove DOC_ID" in printed
    assert len(Corpus.open(out).pages()) == 14


def test_a_corpus_folder_whose_name_is_no_utf8_is_refused(docs, tmp_path):
    with pytest.raises(ValueError, match="must be UTF-8"):
        ingest([docs], tmp_path / os.fsdecode(b"out\xff"))


def test_a_mixed_folder(cases, make_pdf, tmp_path):
    names = ["broken_xref.pdf", "html_named.pdf", "empty_0_bytes.pdf", "enc_user_pw.pdf", "zero_pages.pdf"]
    good = make_pdf(tmp_path / "good.pdf", ["good"])
    report = ingest([*(cases / name for name in names), good], tmp_path / "corpus")
    assert report.new == ["broken_xref.pdf", "good.pdf"]
    assert set(report.failed) == set(names[1:])
    assert all(name in report.failed[name] for name in names[1:])
    assert "has no pages" in report.failed["zero_pages.pdf"]


def test_a_file_of_another_type_is_named_as_such(tmp_path):
    for name in ("notes.docx", "empty.txt", "broken.png"):
        (tmp_path / name).write_text("words" if name != "empty.txt" else "")
    names = ["notes.docx", "empty.txt", "broken.png"]
    report = ingest([tmp_path / name for name in names], tmp_path / "corpus")
    assert report.failed == {
        "notes.docx": "notes.docx has an unsupported type, expected PDFs or images",
        "empty.txt": "empty.txt has an unsupported type, expected PDFs or images",
        "broken.png": "broken.png is not an image this program can read",
    }


def test_documents_are_removed_by_id(docs, tmp_path, capsys):
    out = tmp_path / "corpus"
    ingest([docs], out)
    with pytest.raises(ValueError, match=r"no document 'sub/b\.pdf'; the nearest is 'sub/a\.pdf'"):
        remove_documents(["b.pdf", "sub/b.pdf"], out)
    assert len(Corpus.open(out).pages()) == 14  # nothing was removed
    assert main(["ingest", "--remove", "b.pdf", "-o", str(out)]) == 0
    assert "0 ingested, 0 unchanged, 1 removed, 0 failed; 12 pages" in capsys.readouterr().out
    corpus = Corpus.open(out)
    assert list(corpus.page_counts()) == ["sub/a.pdf"]
    assert len(list((out / "images").iterdir())) == 1
    manifest = json.loads((out / "corpus.json").read_text())
    assert [document["doc_id"] for document in manifest["documents"]] == ["sub/a.pdf"]
    assert ingest([docs], out).new == ["b.pdf"]  # its file is still there
    with pytest.raises(ValueError, match="is not a corpus"):
        remove_documents(["b.pdf"], tmp_path / "nowhere")


def test_an_umlaut_in_either_spelling_is_removed(make_pdf, tmp_path):
    make_pdf(tmp_path / "docs" / "Übersicht.pdf", ["x"])
    ingest([tmp_path / "docs"], tmp_path / "corpus")
    report = remove_documents([unicodedata.normalize("NFD", "Übersicht.pdf")], tmp_path / "corpus")
    assert report.removed == ["Übersicht.pdf"]


@pytest.mark.parametrize("arguments", [[], ["docs", "--remove", "a.pdf"]])
def test_documents_or_ids_to_remove_but_not_both(tmp_path, capsys, arguments):
    assert main(["ingest", "-o", str(tmp_path / "corpus"), *arguments]) == 2
    assert "either documents to ingest or --remove" in capsys.readouterr().err


def test_folders_in_images_that_are_not_ours_stay(docs, tmp_path):
    ingest([docs], tmp_path / "corpus")
    (tmp_path / "corpus" / "images" / "thumbnails").mkdir()
    (tmp_path / "corpus" / "images" / ".DS_Store").write_text("x")
    assert ingest([docs], tmp_path / "corpus").ok
    assert (tmp_path / "corpus" / "images" / "thumbnails").is_dir()


def test_files_in_a_folder_named_journal_that_are_not_ours_stay(docs, tmp_path):
    journal = tmp_path / "photos" / "journal"
    (journal / "old-0123456789abcdef").mkdir(parents=True)
    mine = [journal / "mine.png", journal / "old-0123456789abcdef" / "mine.json"]
    for path in mine:
        path.write_text("mine")
    (journal / "old-0123456789abcdef" / "00001.json").write_text("{}")  # of a killed ingest
    (journal / "ocr.jsonl").write_text("{}")
    assert ingest([docs], tmp_path / "photos").ok
    assert sorted(path for path in journal.rglob("*") if path.is_file()) == sorted(mine)
    for path in mine:
        path.unlink()
    assert ingest([docs], tmp_path / "photos").ok
    assert not journal.exists()


def test_names_that_are_no_utf8(make_pdf, tmp_path, capsys):
    """Each goes in under its escaped id, is found again, and loses its pages when it is gone."""
    docs, out = tmp_path / "docs", tmp_path / "corpus"
    make_pdf(docs / "good.pdf", ["good"])
    make_pdf(docs / r"bad\xff.pdf", ["a backslash of the name's own"])
    try:
        bad = Path(os.fsdecode(os.fsencode(docs) + b"/sub \xe4%/bad\xff.pdf"))
        make_pdf(docs / "x.pdf", ["bad"])
        bad.parent.mkdir()
        (docs / "x.pdf").rename(bad)
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    broken = bad.with_name(os.fsdecode(b"broken\xff.pdf"))
    broken.write_text("no")
    doc_id = r"sub \xe4%/bad\xff.pdf"
    assert main(["ingest", str(docs), "-o", str(out)]) == 3
    assert r"broken\xff.pdf is not a PDF" in capsys.readouterr().out
    corpus = Corpus.open(out)
    assert corpus.page_counts() == {r"bad\xff.pdf": 1, "good.pdf": 1, doc_id: 1}
    assert corpus.page(f"{doc_id}#page=1").text == "bad"
    assert corpus.document_path(doc_id) == bad
    assert corpus.document_path(r"bad\xff.pdf") == docs / r"bad\xff.pdf"
    again = ingest([docs], out)
    assert (again.unchanged, again.new) == ([r"bad\xff.pdf", "good.pdf", doc_id], [])
    bad.unlink()
    assert ingest([docs], out).removed == [doc_id]


def test_page_images_whose_names_are_no_utf8(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/deck\xff"))
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    Image.new("RGB", (30, 30)).save(folder / "1.png")
    (folder / "2.png").write_text("no")
    (folder / os.fsdecode(b"\xfe 3.png")).write_text("no")
    layout = PageImages().find
    report = ingest([folder], tmp_path / "corpus", layout=layout)
    assert report.new == [r"deck\xff"]
    assert list(report.failed) == [r"\xfe"]
    assert ingest([folder], tmp_path / "corpus", layout=layout).unchanged == [r"deck\xff"]


def test_a_document_that_changes_while_it_is_read_has_failed(make_pdf, tmp_path):
    path = make_pdf(tmp_path / "a.pdf", [f"p{n}" for n in range(40)])

    def touch(progress):
        if progress.pages_done == 8:
            os.utime(path, ns=(1, 1))

    report = ingest([path], tmp_path / "corpus", workers=1, progress=touch)
    assert report.failed == {"a.pdf": "a.pdf was changed while it was being read; ingest it again"}
    assert ingest([path], tmp_path / "corpus").new == ["a.pdf"]


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that is there but unreadable")
def test_a_file_that_cannot_be_read_now_keeps_its_pages(docs, tmp_path):
    out = tmp_path / "corpus"
    ingest([docs], out)
    (docs / "b.pdf").unlink()
    (docs / "b.pdf").symlink_to("/proc/self/mem")  # a regular file whose reading gives an I/O error
    report = ingest([docs], out)
    assert report.failed["b.pdf"] == "b.pdf cannot be read: Input/output error"
    assert Corpus.open(out).page_counts() == {"b.pdf": 2, "sub/a.pdf": 12}


def test_progress_counts_pages_and_documents(docs, make_pdf, tmp_path):
    make_pdf(docs / "long.pdf", [f"p{n}" for n in range(50)])
    (docs / "bad.pdf").write_text("no")
    seen = []
    ingest([docs], tmp_path / "corpus", progress=seen.append)
    assert {progress.stage for progress in seen} == {"render"}
    assert [progress.pages_done for progress in seen] == sorted(progress.pages_done for progress in seen)
    last = seen[-1]
    assert (last.documents_done, last.documents, last.pages_done, last.pages) == (4, 4, 64, 64)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_log_gets_about_ten_lines_and_a_terminal_a_bar(make_pdf, tmp_path):
    docs = [make_pdf(tmp_path / "docs" / f"{n}.pdf", ["x"] * 12) for n in range(20)]
    log, terminal = io.StringIO(), Terminal()
    for name, stream in (("a", log), ("b", terminal)):
        with ProgressBar(stream) as progress:
            ingest(docs, tmp_path / name, progress=progress)
    lines = log.getvalue().splitlines()
    assert 5 <= len(lines) <= 13
    assert lines[-1].startswith("pages rendered: 240 of 240, documents 20 of 20, ")
    assert "left" in lines[0]
    bar = terminal.getvalue().split("\r")[-1]
    assert "pages rendered: 100%" in bar
    assert "240/240" in bar
    assert "20/20 documents" in bar


def test_a_bar_without_pages_ends(tmp_path):
    (tmp_path / "bad.pdf").write_text("no")
    log = io.StringIO()
    with ProgressBar(log) as progress:
        ingest([tmp_path / "bad.pdf"], tmp_path / "corpus", progress=progress)
    assert log.getvalue().startswith("pages rendered: 0 of 0, documents 1 of 1, bad.pdf")


# ---------------------------------------------------------------- order of texts


def test_two_columns_of_a_pdf_are_read_one_after_the_other(tmp_path):
    from reportlab.pdfgen.canvas import Canvas

    canvas = Canvas(str(tmp_path / "two.pdf"), pagesize=(400, 300))
    canvas.drawString(20, 270, "A title over both columns of this page")
    for x, side in ((20, "left"), (210, "right")):
        for line in range(5):
            canvas.drawString(x, 240 - 15 * line, f"{side} column line {line}")
    canvas.save()
    ingest([tmp_path / "two.pdf"], tmp_path / "corpus")
    lines = Corpus.open(tmp_path / "corpus").page("two.pdf#page=1").text.splitlines()
    columns = [f"{side} column line {line}" for side in ("left", "right") for line in range(5)]
    assert lines == ["A title over both columns of this page", *columns]


def test_the_columns_of_a_real_paper(tmp_path):
    paper = SAMPLE / "2023.acl-long.386.pdf"
    if not paper.is_file():
        pytest.skip("the sample of MMLongBench-Doc is not beside the project")
    with open_pdf(paper) as pdf:
        text = read_page(pdf, 1, 36, 1_000_000).text
    places = [
        text.index(words)
        for words in (
            "Fact-Checking Complex Claims with Program-Guided Reasoning",
            "Abstract",
            "claims into simpler sub-tasks that can be solved",  # left column
            "1 Introduction",
            "https://github.com/mbzuai-nlp/ProgramFC",  # foot of the left column
            "Instead, a human fact-checker needs to decompose the claim",  # head of the right column
            "reasoning process to help users understand",
        )
    ]
    assert places == sorted(places)


# ---------------------------------------------------------------- document ids


def test_each_file_once(docs):
    assert find_sources([docs, docs / "b.pdf", docs]) == [
        ("b.pdf", docs / "b.pdf"),
        ("sub/a.pdf", docs / "sub" / "a.pdf"),
    ]


def test_same_names_get_distinct_stable_ids(make_pdf, tmp_path):
    for folder in ("x", "y", "z"):
        make_pdf(tmp_path / folder / "a.pdf", [folder])
    out = tmp_path / "corpus"
    assert ingest([tmp_path / "x", tmp_path / "y"], out).new == ["a.pdf", "a~2.pdf"]
    assert ingest([tmp_path / "y", tmp_path / "x"], out).unchanged == ["a~2.pdf", "a.pdf"]
    assert ingest([tmp_path / "z"], out).new == ["a~3.pdf"]
    texts = {page.page_id: page.text for page in Corpus.open(out).pages()}
    assert texts == {"a.pdf#page=1": "x", "a~2.pdf#page=1": "y", "a~3.pdf#page=1": "z"}


def test_a_moved_document_keeps_its_id(make_pdf, tmp_path):
    make_pdf(tmp_path / "x" / "a.pdf", ["a"])
    ingest([tmp_path / "x"], tmp_path / "corpus")
    (tmp_path / "x").rename(tmp_path / "y")
    assert ingest([tmp_path / "y"], tmp_path / "corpus").unchanged == ["a.pdf"]
    assert Corpus.open(tmp_path / "corpus").document_path("a.pdf") == tmp_path / "y" / "a.pdf"


def test_both_spellings_of_a_name_become_two_documents(make_pdf, tmp_path):
    for form in ("NFC", "NFD"):
        make_pdf(tmp_path / "docs" / unicodedata.normalize(form, "ü.pdf"), [form])
    found = find_sources([tmp_path / "docs"])
    assert [source.doc_id for source in assign_ids(found, {})] == ["ü.pdf", "ü~2.pdf"]


def test_a_suffix_is_not_taken_twice():
    found = [("a~2.pdf", Path("/1")), ("a.pdf", Path("/2")), ("a.pdf", Path("/3")), ("README", Path("/4"))]
    assert [source.doc_id for source in assign_ids(found, {})] == ["a~2.pdf", "a.pdf", "a~3.pdf", "README"]
    assert [s.doc_id for s in assign_ids([("a.pdf", Path("/9"))], {"a.pdf": "/8"})] == ["a~2.pdf"]
    assert [s.doc_id for s in assign_ids([("a.pdf", Path("/9"))], {"a.pdf": "/8"}, {"a.pdf"})] == ["a.pdf"]


# ---------------------------------------------------------------- crashes


def run_python(code, *arguments, **options):
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], **options)


def test_two_ingests_at_once_are_refused(docs, tmp_path):
    code = "import sys, time; from data.corpus_writer import only_one; from pathlib import Path\n"
    code += "with only_one(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    (tmp_path / "corpus").mkdir()
    process = run_python(code, tmp_path / "corpus", stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="another ingest"):
            ingest([docs], tmp_path / "corpus")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert ingest([docs], tmp_path / "corpus").ok
