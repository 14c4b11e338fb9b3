"""Each benchmark as it lies on disk → a corpus and its questions, by the command."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data.benchmarks import ingest_as
from data.corpus import Corpus
from data.corpus_files import read_corpus
from data.questions import load_questions
from data.table_rows import find_row_files, split_of
from visor.cli import main


def run(*words):
    return main(["ingest", *map(str, words), "--ocr", "off"])


def prepare(format_name, paths, out):
    return ingest_as(format_name)(paths, out, ocr="off")


def png(shade, size=(40, 56)):
    buffer = io.BytesIO()
    Image.new("RGB", size, (shade, 90, 90)).save(buffer, "PNG")
    return buffer.getvalue()


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# ---------------------------------------------------------------- SlideVQA


def slide_row(qa_id, deck, pages, slides=20, **more):
    """A row of the hub's data set; the shade of a slide is its number."""
    images = {
        f"page_{n}": {"bytes": png(n, (40 + n, 56)), "path": None} if n <= slides else None
        for n in range(1, 21)
    }
    fixed = {"deck_url": f"u/{deck}", "question": f"question {qa_id}", "answer": "a", **more}
    fixed.setdefault("arithmetic_expression", "None")
    return {"qa_id": qa_id, "deck_name": deck, "evidence_pages": pages, **fixed, **images}


def write_rows(path, rows):
    """Write rows with the schema of the hub's files, features of `datasets` included."""
    from datasets import Features, Image, List, Value

    texts = "deck_name deck_url question answer arithmetic_expression".split()
    features = Features(
        {f"page_{n}": Image() for n in range(1, 21)}
        | {name: Value("string") for name in texts}
        | {"qa_id": Value("int64"), "evidence_pages": List(Value("int64"))}
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=features.arrow_schema), path, row_group_size=2)


@pytest.fixture
def hub(tmp_path):
    """The hub's folder: shards of two splits."""
    folder = tmp_path / "SlideVQA" / "data"
    shards = {
        "test-00000-of-00002": [slide_row(1, "deck_a", [2, 20]), slide_row(2, "deck_a", [3])],
        "test-00001-of-00002": [
            slide_row(3, "deck b", [0, 21, 5], answer="12.50", arithmetic_expression="10 + 2.5"),
            slide_row(3, "deck b", [5]),
            slide_row(4, "deck_c", [19], slides=18),
            slide_row(5, "deck_c", [1], answer=None),
        ],
        "train-00000-of-00001": [slide_row(1, "deck_d", [])],
    }
    for name, rows in shards.items():
        write_rows(folder / f"{name}.parquet", rows)
    return folder.parent


def test_slidevqa_rows_of_the_hub(hub, tmp_path, capsys):
    out = tmp_path / "corpus"
    assert run(hub, "-o", out, "--format", "slidevqa") == 0
    printed = capsys.readouterr().out
    corpus = Corpus.open(out)
    assert corpus.page_counts() == {"deck b": 20, "deck_a": 20, "deck_c": 18, "deck_d": 20}
    assert [page.width for page in corpus.pages() if page.doc_id == "deck_a"] == list(range(41, 61))
    assert corpus.image("deck_a#page=10").getpixel((0, 0))[0] == 10
    questions = {q.question_id: q for q in load_questions(f"questions:{out / 'questions.jsonl'}", corpus)}
    assert set(questions) == {"test:1", "test:2", "test:3", "test:3~2", "test:4", "train:1"}
    assert questions["test:1"].gold_page_ids == ["deck_a#page=2", "deck_a#page=20"]
    assert questions["test:1"].tags == {
        "benchmark": "slidevqa",
        "split": "test",
        "hop": "multi",
        "numerical": False,
        "_doc_id": "deck_a",
        "_arithmetic_expression": "",
    }
    assert questions["test:3"].gold_page_ids == ["deck b#page=5"]
    assert questions["test:3"].gold_answers == ["12.50"]
    assert questions["test:3"].tags["numerical"] is True
    assert questions["test:4"].gold_page_ids == []
    assert "6 questions read, 4 with gold pages" in printed
    assert "3 gold pages are outside their document" in printed
    for words in ("page 0 is outside 1..20 of deck b", "page 21 is outside", "page 19 is outside 1..18"):
        assert words in printed
    assert "2 rows of questions are left out or renamed" in printed
    assert "row 4: answer is null, not an answer; left out" in printed
    assert "(train:1): no evidence page is given" in printed
    assert "id test:3 is used before" in printed
    assert load_questions(f"slidevqa:{hub}", corpus, []) == list(questions.values())
    only_test = load_questions(f"slidevqa:{hub}/data/test-*.parquet", corpus, [])
    assert {q.tags["split"] for q in only_test} == {"test"}


def test_slidevqa_is_brought_up_to_date(hub, tmp_path):
    out = tmp_path / "corpus"
    prepare("slidevqa", [hub], out)
    written = {path: path.stat().st_mtime_ns for path in (out / "sources").rglob("page_*")}
    assert len(written) == 78
    assert len(prepare("slidevqa", [hub], out).unchanged) == 4
    assert written == {path: path.stat().st_mtime_ns for path in (out / "sources").rglob("page_*")}
    shard = hub / "data" / "test-00000-of-00002.parquet"
    write_rows(shard, [slide_row(1, "deck_a", [2], slides=19)])
    report = prepare("slidevqa", [hub], out)
    assert (report.new, len(report.unchanged)) == (["deck_a"], 3)
    assert Corpus.open(out).page_counts()["deck_a"] == 19


def test_slidevqa_saved_by_datasets(hub, tmp_path):
    from datasets import load_dataset

    rows = load_dataset(
        "parquet",
        data_files={split: str(hub / "data" / f"{split}-*.parquet") for split in ("train", "test")},
        cache_dir=str(tmp_path / "cache"),
    )
    rows.save_to_disk(str(tmp_path / "saved"))
    cached = next((tmp_path / "cache").rglob("*-test*.arrow"))
    prepare("slidevqa", [hub], tmp_path / "a")
    prepare("slidevqa", [tmp_path / "saved"], tmp_path / "b")
    assert Corpus.open(tmp_path / "a").pages() == Corpus.open(tmp_path / "b").pages()
    first, second = ((tmp_path / name / "questions.jsonl").read_text() for name in "ab")
    assert first == second
    assert {row.split for row in find_row_files(cached)} == {"test"}
    in_cache = load_questions(f"slidevqa:{cached}")
    assert [q.text for q in in_cache] == [q.text for q in load_questions(f"slidevqa:{hub}/data/test-*")]


def test_slidevqa_annotations_with_slide_folders(tmp_path):
    rows = [{"qa_id": 7, "deck_name": "deck_a", "question": "q", "answer": "a", "evidence_pages": [2]}]
    write_lines(tmp_path / "annotations" / "dev.jsonl", rows)
    for number in (1, 2, 10):
        path = tmp_path / "images" / "deck_a" / f"slide-{number}-1024.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(number))
    report = prepare("slidevqa", [tmp_path / "annotations", tmp_path / "images"], tmp_path / "corpus")
    assert report.new == ["deck_a"]
    (question,) = load_questions(f"questions:{tmp_path / 'corpus' / 'questions.jsonl'}")
    assert (question.question_id, question.gold_page_ids) == ("dev:7", ["deck_a#page=2"])


def test_a_killed_slidevqa_ingest_continues(tmp_path):
    folder = tmp_path / "data"
    write_rows(folder / "test-0.parquet", [slide_row(n, f"deck_{n}", [1]) for n in range(6)])
    out = tmp_path / "corpus"
    command = [
        sys.executable,
        "-m",
        "visor.cli",
        "ingest",
        folder,
        "-o",
        out,
        "--format",
        "slidevqa",
        "--ocr",
        "off",
    ]
    process = subprocess.Popen(
        [*map(str, command)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    while not list(out.glob("sources/slidevqa/deck_1-*/deck.json")):
        assert process.poll() is None
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stderr.close()
    extracted = {p: p.stat().st_mtime_ns for p in (out / "sources/slidevqa").glob("deck*/page_*")}
    report = prepare("slidevqa", [folder], out)
    assert report.pages == 120
    assert all(path.stat().st_mtime_ns == written for path, written in extracted.items())
    whole = prepare("slidevqa", [folder], tmp_path / "whole")
    assert whole.pages == 120
    assert read_corpus(out)[1] == read_corpus(tmp_path / "whole")[1]


@pytest.mark.parametrize(
    ("parts", "split"),
    [
        ("data/test-00000-of-00002.parquet", "test"),
        ("val/data-00000-of-00001.arrow", "val"),
        ("slide_vqa-validation.arrow", "val"),
        ("testing/rows.parquet", ""),
        ("latest-rows.parquet", ""),
        ("dev.jsonl", "dev"),
    ],
)
def test_splits_are_read_from_names(tmp_path, parts, split):
    assert split_of(tmp_path / parts, tmp_path) == split


def test_rows_of_something_else_are_refused_before_anything_is_done(tmp_path, capsys):
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "rows.parquet")
    (tmp_path / "broken.parquet").write_text("no")
    assert run(tmp_path / "rows.parquet", "-o", tmp_path / "c", "--format", "slidevqa") == 2
    assert "no file has rows of SlideVQA" in capsys.readouterr().err
    assert run(tmp_path / "broken.parquet", "-o", tmp_path / "c", "--format", "slidevqa") == 2
    assert "broken.parquet is not a parquet file" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


# ---------------------------------------------------------------- ViDoSeek


@pytest.fixture
def vidoseek(make_pdf, tmp_path):
    folder = tmp_path / "ViDoSeek"
    make_pdf(folder / "vidoseek_pdf_document" / "x.pdf", ["one", "two"])
    make_pdf(folder / "vidoseek_pdf_document" / "extra.pdf", ["no question"])
    (folder / "vidoseek_pdf_document" / "broken.pdf").write_text("no")

    def example(uid, name, pages):
        meta = {"file_name": name, "reference_page": pages, "query_type": "Single-Hop_Single-Span"}
        return {"uid": uid, "query": f"q {uid}", "reference_answer": "a", "meta_info": meta}

    examples = [
        example("u1", "x.pdf", [2]),
        example("u2", "x.pdf", [3]),
        example("u3", "gone.pdf", [1]),
        example("u4", "broken.pdf", [1]),
        example("u5", "gone.pdf", [2]),
    ]
    (folder / "vidoseek.json").write_text(json.dumps({"examples": examples}))
    (folder / "notes.json").write_text("{}")
    return folder


def test_vidoseek_names_what_is_missing_failed_and_extra(vidoseek, tmp_path, capsys):
    out = tmp_path / "corpus"
    assert run(vidoseek, "-o", out, "--format", "vidoseek") == 3
    printed = capsys.readouterr().out
    assert Corpus.open(out).page_counts() == {"x.pdf": 2, "extra.pdf": 1}
    assert "5 questions read, 4 with gold pages" in printed
    assert "page 3 is outside 1..2 of x.pdf" in printed
    assert "failed: gone.pdf: there is no such document; 2 questions are about it" in printed
    assert "failed: broken.pdf: broken.pdf is not a PDF" in printed
    assert "1 question is about broken.pdf, which failed" in printed
    assert "no question is about 1 document: extra.pdf" in printed
    questions = load_questions(f"questions:{out / 'questions.jsonl'}", Corpus.open(out), [])
    assert [q.gold_page_ids for q in questions[:3]] == [["x.pdf#page=2"], [], ["gone.pdf#page=1"]]
    assert questions[0].tags["benchmark"] == "vidoseek"
    assert questions[0].tags["hop"] == "single"


def test_vidoseek_with_two_question_files(vidoseek, tmp_path):
    content = (vidoseek / "vidoseek.json").read_text()
    (vidoseek / "slidevqa_refined.json").write_text(content)
    report = prepare("vidoseek", [vidoseek], tmp_path / "corpus")
    assert report.questions.read == 10
    questions = load_questions(f"questions:{tmp_path / 'corpus' / 'questions.jsonl'}")
    assert {q.question_id for q in questions} >= {"vidoseek.json:u1", "slidevqa_refined.json:u1"}
    assert {q.tags["question_file"] for q in questions} == {"vidoseek.json", "slidevqa_refined.json"}
    assert ["slidevqa_refined.json:u1", "vidoseek.json:u1"] in report.questions.equal


def test_vidoseek_as_page_images(vidoseek, tmp_path):
    for number in (1, 2, 10):
        path = tmp_path / "img" / f"x_{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (60, 80)).save(path)
    report = prepare("vidoseek", [tmp_path / "img", vidoseek / "vidoseek.json"], tmp_path / "corpus")
    assert report.new == ["x"]
    questions = load_questions(f"vidoseek:{vidoseek / 'vidoseek.json'}", Corpus.open(tmp_path / "corpus"), [])
    assert questions[0].gold_page_ids == ["x#page=2"]


# ---------------------------------------------------------------- MMLongBench-Doc


@pytest.fixture
def mmlongbench(make_pdf, tmp_path):
    folder = tmp_path / "MMLongBench-Doc"
    make_pdf(folder / "data" / "documents" / "x.pdf", ["one", "two"])
    row = {"doc_id": "x.pdf", "doc_type": "t", "evidence_sources": "['Chart']", "answer_format": "Str"}
    rows = [
        {**row, "question": "q1", "answer": "a", "evidence_pages": "[2, 2]"},
        {**row, "question": "q1", "answer": "a", "evidence_pages": "[2]"},
        {**row, "question": "q2", "answer": "Not answerable", "evidence_pages": "[]"},
    ]
    (folder / "data" / "samples.json").write_text(json.dumps(rows))
    return folder


def test_mmlongbench_as_its_repository_lies(mmlongbench, tmp_path, capsys):
    out = tmp_path / "corpus"
    assert run(mmlongbench, "-o", out, "--format", "mmlongbench", "--questions", tmp_path / "q.jsonl") == 0
    printed = capsys.readouterr().out
    assert "3 questions read, 2 with gold pages, 1 unanswerable" in printed
    assert "equal questions, each kept: x.pdf:" in printed
    assert not (out / "questions.jsonl").exists()
    questions = load_questions(f"questions:{tmp_path / 'q.jsonl'}", Corpus.open(out))
    assert [q.gold_page_ids for q in questions] == [["x.pdf#page=2"]] * 2 + [[]]
    assert questions[0].tags["evidence_sources"] == ["Chart"]
    assert questions[0].answer_format == "Str"


def test_mmlongbench_rows_of_the_hub(mmlongbench, tmp_path):
    samples = mmlongbench / "data" / "samples.json"
    expected = load_questions(f"mmlongbench:{samples}")
    table = mmlongbench / "data" / "train-00000-of-00001.parquet"
    pq.write_table(pa.Table.from_pylist(json.loads(samples.read_text())), table)
    assert load_questions(f"mmlongbench:{table}") == expected
    samples.unlink()
    prepare("mmlongbench", [mmlongbench], tmp_path / "corpus")
    assert load_questions(f"questions:{tmp_path / 'corpus' / 'questions.jsonl'}") == expected


def test_questions_of_another_benchmark_are_not_overwritten(mmlongbench, vidoseek, tmp_path, capsys):
    out = tmp_path / "corpus"
    run(mmlongbench, "-o", out, "--format", "mmlongbench")
    assert run(mmlongbench, "-o", out, "--format", "mmlongbench") == 0
    before = (out / "questions.jsonl").read_text()
    capsys.readouterr()
    assert run(vidoseek, "-o", out, "--format", "vidoseek") == 2
    error = capsys.readouterr().err
    assert "holds the questions of mmlongbench" in error
    assert "--questions" in error
    assert (out / "questions.jsonl").read_text() == before
    assert run(vidoseek, "-o", out, "--format", "vidoseek", "--questions", tmp_path / "v.jsonl") == 3
    (out / "questions.jsonl").write_text('{"question_id": "mine", "text": "t"}\n')
    capsys.readouterr()
    assert run(mmlongbench, "-o", out, "--format", "mmlongbench") == 2
    assert "questions of your own" in capsys.readouterr().err


def test_missing_or_broken_questions_stop_before_the_work(make_pdf, tmp_path, capsys):
    make_pdf(tmp_path / "docs" / "x.pdf", ["one"])
    for name in ("mmlongbench", "vidoseek"):
        assert run(tmp_path / "docs", "-o", tmp_path / "c", "--format", name) == 2
        assert f"found no questions of {name}" in capsys.readouterr().err
    (tmp_path / "docs" / "samples.json").write_text("{")
    assert run(tmp_path / "docs", "-o", tmp_path / "c", "--format", "mmlongbench") == 2
    assert "samples.json, line 1: not JSON" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_a_file_name_in_two_folders(mmlongbench, make_pdf, tmp_path):
    make_pdf(mmlongbench / "more" / "x.pdf", ["another"])
    report = prepare("mmlongbench", [mmlongbench], tmp_path / "corpus")
    assert sorted(report.new) == ["data/documents/x.pdf", "more/x.pdf"]
    assert any("1 file name is used twice" in note for note in report.layout_notes)
    assert report.questions.missing == {"x.pdf": 3}


# ---------------------------------------------------------------- DocBench


@pytest.fixture
def docbench(make_pdf, tmp_path):
    folder = tmp_path / "DocBench"
    rows = [
        {"question": "q1", "answer": "a", "type": "text-only", "evidence": "e"},
        {"question": "q1", "answer": "a", "type": "text-only", "evidence": "e"},
        {"question": "q2", "answer": "nowhere", "type": "una", "evidence": ""},
        {"question": "", "answer": "a"},
        {"question": "q3", "answer": None},
        {"question": "q4", "answer": 12.50},
    ]
    for number in (2, 10, 132):
        make_pdf(folder / str(number) / "paper.pdf", [f"paper {number}"])
        write_lines(folder / str(number) / f"{number}_qa.jsonl", rows if number == 10 else rows[:1])
    with (folder / "10" / "10_qa.jsonl").open("a") as stream:
        stream.write('{"question": \n')
    write_lines(folder / "200" / "200_qa.jsonl", rows[:1])
    (folder / "10" / "mineru").mkdir()
    Image.new("RGB", (50, 50)).save(folder / "10" / "mineru" / "figure_1.png")
    (folder / "notes").mkdir()
    return folder


def test_docbench_folders(docbench, tmp_path, capsys):
    out = tmp_path / "corpus"
    assert run(docbench, "-o", out, "--format", "docbench") == 3
    printed = capsys.readouterr().out
    corpus = Corpus.open(out)
    assert corpus.page_counts() == {"10/paper.pdf": 1, "132/paper.pdf": 1, "2/paper.pdf": 1}
    problems = []
    questions = load_questions(f"docbench:{docbench}", corpus, problems)
    assert [q.question_id.split(":")[0] for q in questions] == ["2", "10", "10", "10", "10", "132", "200"]
    assert len({q.question_id for q in questions}) == 7
    by_text = {q.text: q for q in questions if q.question_id.startswith("10:")}
    assert by_text["q1"].tags == {
        "benchmark": "docbench",
        "_doc_id": "10/paper.pdf",
        "question_type": "text-only",
        "domain": "academic",
        "answerable": True,
        "_evidence": "e",
    }
    assert by_text["q2"].tags["answerable"] is False
    assert by_text["q4"].gold_answers == ["12.5"]
    assert questions[5].tags["domain"] == "government"
    assert len(problems) == 3
    assert all("10_qa.jsonl, line" in problem for problem in problems)
    assert "7 questions read, 0 with gold pages, 1 unanswerable" in printed
    assert "failed: 200: there is no such document; 1 question is about it" in printed
    assert "10_qa.jsonl, line 7: not JSON" in printed
    assert load_questions(f"questions:{out / 'questions.jsonl'}", corpus) == questions


def test_docbench_one_folder_and_one_file_have_the_same_ids(docbench, tmp_path):
    everything = load_questions(f"docbench:{docbench}", problems=[])
    for path in (docbench / "132", docbench / "132" / "132_qa.jsonl"):
        assert load_questions(f"docbench:{path}") == [q for q in everything if q.question_id[:3] == "132"]
    report = prepare("docbench", [docbench / "132"], tmp_path / "corpus")
    assert report.new == ["132/paper.pdf"]


def test_docbench_in_a_corpus_of_its_plain_folder(docbench, tmp_path):
    from data.corpus import ingest

    ingest([docbench / "132"], tmp_path / "corpus")
    (question,) = load_questions(f"docbench:{docbench / '132'}", Corpus.open(tmp_path / "corpus"))
    assert question.tags["_doc_id"] == "paper.pdf"


def test_docbench_with_two_pdfs_in_a_folder(docbench, make_pdf, tmp_path):
    make_pdf(docbench / "2" / "other.pdf", ["other"])
    report = prepare("docbench", [docbench], tmp_path / "corpus")
    assert {"2/paper.pdf", "2/other.pdf"} <= set(report.new)
    assert any("which of its PDFs" in problem for problem in report.questions.problems)
    assert report.questions.missing == {"2": 1, "200": 1}


@pytest.mark.parametrize("spec", ["slidevqa:nowhere", "docbench:nowhere"])
def test_readers_of_folders_name_what_is_not_there(spec):
    with pytest.raises(ValueError, match="nowhere"):
        load_questions(spec)


# ---------------------------------------------------------------- the command


def test_formats_are_refused_by_name(tmp_path, capsys):
    assert run(tmp_path, "-o", tmp_path / "c", "--format", "word") == 2
    assert "unknown format 'word'; known: files, page-images, slidevqa" in capsys.readouterr().err
    assert run(tmp_path, "-o", tmp_path / "c", "--questions", tmp_path / "q") == 2
    assert "--questions goes with the format of a benchmark" in capsys.readouterr().err
    assert run(tmp_path / "none", "-o", tmp_path / "c", "--format", "docbench") == 2
    assert "no such file or folder" in capsys.readouterr().err


def test_page_images_by_the_command(tmp_path, capsys):
    for number in (1, 2, 10):
        path = tmp_path / "pages" / f"name_{number}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(png(number))
    assert run(tmp_path / "pages", "-o", tmp_path / "corpus", "--format", "page-images") == 0
    assert "pages 3-9: there is no image of it" in capsys.readouterr().out
    pages = [page.page_id for page in Corpus.open(tmp_path / "corpus").pages()]
    assert pages == ["name#page=1", "name#page=2", "name#page=10"]
    assert not (tmp_path / "corpus" / "questions.jsonl").exists()


# ---------------------------------------------------------------- the real samples


@pytest.mark.slow
def test_the_real_samples(cases, tmp_path, capsys):
    samples = cases.parents[1] / "data"
    if not samples.is_dir():
        pytest.skip("the samples of the benchmarks are not beside this checkout")
    expected = {
        "mmlongbench": (14, 329, "134 questions read, 104 with gold pages, 28 unanswerable"),
        "docbench": (1, 12, "10 questions read, 0 with gold pages, 0 unanswerable"),
        "vidoseek": (1, 23, "1 question read, 1 with gold pages, 0 unanswerable"),
    }
    for name, (documents, pages, words) in expected.items():
        out = tmp_path / name
        assert run(samples / name, "-o", out, "--format", name) == 0
        assert words in capsys.readouterr().out
        corpus = Corpus.open(out)
        assert (len(corpus.documents()), len(corpus.pages())) == (documents, pages)
        problems = []
        questions = load_questions(f"questions:{out / 'questions.jsonl'}", corpus, problems)
        assert problems == []
        for question in questions:
            document = question.tags.get("_doc_id") or question.tags.get("doc_id")
            assert {corpus.page(page_id).doc_id for page_id in question.gold_page_ids} <= {document}
        if name == "mmlongbench":
            answerable = [q for q in questions if q.tags["answerable"]]
            assert len(answerable) == 106
            assert sum(bool(q.gold_page_ids) for q in answerable) == 102


def test_an_image_in_place_of_questions_is_named(tmp_path, capsys):
    (tmp_path / "truncated.jpg").write_bytes(b"\xff\xd8\xff\xe0")
    given = [str(tmp_path / "truncated.jpg"), "-o", str(tmp_path / "corpus"), "--format", "mmlongbench"]
    assert main(["ingest", *given]) == 2
    assert "truncated.jpg is not UTF-8 text" in capsys.readouterr().err
