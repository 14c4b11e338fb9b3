import json

import pytest

from data.corpus import Corpus, ingest
from data.gold import GoldPages, distinct_id
from data.mmlongbench import parse_list
from data.questions import load_questions
from visor.types import Question


@pytest.fixture
def corpus(make_pdf, tmp_path):
    make_pdf(tmp_path / "docs" / "synthetic_23p.pdf", [str(n) for n in range(1, 24)])
    make_pdf(tmp_path / "docs" / "sub" / "x.pdf", ["one"])
    ingest([tmp_path / "docs"], tmp_path / "corpus", dpi=30)
    return Corpus.open(tmp_path / "corpus")


def write(tmp_path, content, name="q.json"):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


# ---------------------------------------------------------------- MMLongBench-Doc


def test_mmlongbench_oddities(cases, corpus):
    problems = []
    rows = load_questions(f"mmlongbench:{cases / 'mmlb_odd.json'}", corpus, problems)
    assert len(rows) == len({row.question_id for row in rows}) == 18
    by_text = {row.text: row for row in rows}

    def pages(text):
        return [int(page_id.rpartition("=")[2]) for page_id in by_text[text].gold_page_ids]

    assert pages("q-first-page") == pages("q-beyond") == pages("q-unanswerable") == []
    assert pages("q-last-page") == [2, 22, 23]
    assert pages("q-dup-pages") == [6]
    assert "synthetic_23p.pdf#page=23" not in by_text["q-first-page"].gold_page_ids
    for number in (0, 82, 121):
        assert any(f"page {number} is outside 1..23" in problem for problem in problems)
    assert [problem.kind for problem in problems].count("gold page") == 3
    assert any("answerable, but no evidence page" in problem for problem in problems)
    assert len(problems) == 4
    lists = {
        text: by_text[text].tags["_answer_list"] for text in by_text if by_text[text].answer_format == "List"
    }
    assert lists == {
        "q-list": ["White", "10%"],
        "q-list-nums": [1500, 8000],
        "q-list-empty": [],
        "q-apos": ["Queen's Park", "A, B"],
    }
    assert all(row.tags["_doc_id"] == row.question_id.rpartition(":")[0] for row in rows)
    # Answers stay as they are written, whatever their format is said to be.
    written = {row["question"]: row["answer"] for row in json.loads((cases / "mmlb_odd.json").read_text())}
    assert {row.text: row.gold_answers for row in rows} == {text: [a] for text, a in written.items()}
    assert by_text["q-int-percent"].gold_answers == ["21%"]
    assert by_text["q-int-word"].gold_answers == ["yes"]
    assert by_text["q-float-space"].gold_answers == [" 12.35"]
    equal = [row.question_id for row in rows if row.text == "q-same"]
    assert equal[1] == f"{equal[0]}~2"
    assert by_text["q-unanswerable"].tags["answerable"] is False
    assert by_text["q-empty-but-answerable"].tags["answerable"] is True
    assert (by_text["q-last-page"].tags["hop"], by_text["q-dup-pages"].tags["hop"]) == ("multi", "single")


def test_mmlongbench_ids_do_not_depend_on_the_other_rows(cases, tmp_path):
    rows = json.loads((cases / "mmlb_odd.json").read_text())
    everything = load_questions(f"mmlongbench:{cases / 'mmlb_odd.json'}", problems=[])
    part = load_questions(f"mmlongbench:{write(tmp_path, rows[5:])}", problems=[])
    assert [q.question_id for q in part] == [q.question_id for q in everything[5:]]


def test_mmlongbench_defective_rows_are_named_and_left_out(tmp_path):
    good = {"doc_id": "a.pdf", "question": "q", "answer": "x", "evidence_pages": "[1]"}
    bad = [
        {**good, "evidence_pages": "__import__('os').abort()"},
        {**good, "evidence_pages": "['1']"},
        {**good, "answer": None},
        {**good, "evidence_pages": "7"},
    ]
    problems = []
    rows = load_questions(f"mmlongbench:{write(tmp_path, [*bad, good])}", problems=problems)
    assert [row.gold_page_ids for row in rows] == [["a.pdf#page=1"]]
    assert [f"row {n}" in problem for n, problem in enumerate(problems, start=1)] == [True] * 4


def test_mmlongbench_list_answer_that_is_none_is_kept_as_text(tmp_path):
    row = {"doc_id": "a.pdf", "question": "q", "answer": "red, blue", "answer_format": "List"}
    problems = []
    (question,) = load_questions(f"mmlongbench:{write(tmp_path, [row])}", problems=problems)
    assert question.gold_answers == ["red, blue"]
    assert "_answer_list" not in question.tags
    assert "kept as text" in problems[0]


def test_problems_are_logged_when_nobody_collects_them(cases, caplog):
    load_questions(f"mmlongbench:{cases / 'mmlb_odd.json'}")
    assert "page 0 is outside" in caplog.text


def test_lists_are_never_evaluated(tmp_path):
    marker = tmp_path / "made"
    with pytest.raises(ValueError, match="row 1"):
        parse_list(f"[open({str(marker)!r}, 'w')]", "row 1")
    assert not marker.exists()


# ---------------------------------------------------------------- VRAG / ViDoSeek


def test_uid_zero_and_its_neighbours(cases):
    problems = []
    rows = load_questions(f"vidoseek:{cases / 'uid_zero.json'}", problems=problems)
    assert [(row.question_id, row.text, row.gold_answers) for row in rows] == [
        ("0", "q0", ["a0"]),
        ("0~2", "q0s", ["12.5"]),
    ]
    [left_out] = [problem for problem in problems if problem.kind == "row"]
    assert "uid 2" in left_out
    assert "reference_answer" in left_out
    assert rows[0].tags["evidence_sources"] == ["Chart"]
    assert rows[1].tags["hop"] == "single"


def test_vidoseek_gold_pages(corpus, tmp_path):
    meta = {"file_name": "x.pdf", "reference_page": [1, 2], "query_type": "Multi-Hop_Single-Span"}
    example = {"uid": "u", "query": "q", "reference_answer": "a", "meta_info": meta}
    lost = {**example, "uid": "v", "meta_info": {**meta, "file_name": "lost.pdf"}}
    problems = []
    rows = load_questions(f"vidoseek:{write(tmp_path, {'examples': [example, lost]})}", corpus, problems)
    assert rows[0].gold_page_ids == ["sub/x.pdf#page=1"]
    assert rows[0].tags["hop"] == "multi"
    assert rows[1].gold_page_ids == ["lost.pdf#page=1", "lost.pdf#page=2"]
    assert "page 2 is outside 1..1 of sub/x.pdf" in problems[0]
    assert "lost.pdf is not in the corpus" in problems[1]


def test_vidoseek_repeated_uid_is_made_distinct_and_named(tmp_path):
    meta = {"file_name": "x.pdf", "reference_page": [1]}
    example = {"uid": 7, "query": "q", "reference_answer": "a", "meta_info": meta}
    problems = []
    rows = load_questions(f"vidoseek:{write(tmp_path, {'examples': [example, example]})}", problems=problems)
    assert [row.question_id for row in rows] == ["7", "7~2"]
    [problem] = problems
    assert "example 2 (uid 7): the uid is used before; this one is 7~2" in problem


def test_vidoseek_decimals_are_kept_as_written(tmp_path):
    text = (
        '{"examples": [{"uid": 1, "query": "q", "reference_answer": 12.50, "meta_info": {"file_name": "x"}}]}'
    )
    assert load_questions(f"vidoseek:{write(tmp_path, text)}")[0].gold_answers == ["12.50"]


@pytest.mark.parametrize("content", ["[1]", '{"rows": []}', "{", '{"examples": [1]}'])
@pytest.mark.parametrize("name", ["mmlongbench", "vidoseek"])
def test_other_shapes_are_refused_by_name(tmp_path, name, content):
    with pytest.raises(ValueError, match=r"q\.json"):
        load_questions(f"{name}:{write(tmp_path, content)}")


# ---------------------------------------------------------------- our JSON lines


def test_round_trip(tmp_path):
    rows = [
        Question(question_id="1", text="a\u2028b\r", gold_answers=["x"], gold_page_ids=["d.pdf#page=1"]),
        Question(question_id="2", text="ü", tags={"hop": "multi"}),
    ]
    path = write(tmp_path, "".join(row.model_dump_json() + "\n" for row in rows))
    assert load_questions(f"questions:{path}") == rows


def test_byte_order_mark_crlf_and_last_line(cases):
    rows = load_questions(f"questions:{cases / 'bom_crlf.jsonl'}")
    assert [row.question_id for row in rows] == ["q1", "q2", "q3"]
    assert [row.text for row in rows] == ["first", "第二", "third"]
    assert [row.gold_answers for row in rows] == [["a"], ["b"], ["c"]]


def test_no_carriage_return_stays_in_a_value(cases):
    rows = load_questions(f"questions:{cases / 'bom_crlf.jsonl'}")
    assert "\r" not in "".join(row.model_dump_json() for row in rows)
    assert (cases / "bom_crlf.jsonl").read_bytes().count(b"\r\n") >= 2


@pytest.mark.parametrize("name", ["mmlongbench", "vidoseek", "docbench", "slidevqa"])
def test_byte_order_mark_and_crlf_in_every_reader(tmp_path, name):
    row = {"doc_id": "a.pdf", "deck_name": "a.pdf", "qa_id": 1, "question": "q", "answer": "x"}
    row |= {"evidence_pages": [1]} if name == "slidevqa" else {}
    meta = {"file_name": "a.pdf", "reference_page": [1]}
    example = {"uid": 1, "query": "q", "reference_answer": "x", "meta_info": meta}
    content = {
        "mmlongbench": json.dumps([row], indent=1),
        "vidoseek": json.dumps({"examples": [example]}, indent=1),
        "docbench": json.dumps(row) + "\n\n" + json.dumps(row | {"question": "r"}),
        "slidevqa": json.dumps(row) + "\n\n" + json.dumps(row | {"qa_id": 2}),
    }[name]
    path = tmp_path / "3" / "3_qa.jsonl"
    path.parent.mkdir()
    path.write_bytes(b"\xef\xbb\xbf" + content.replace("\n", "\r\n").encode())
    rows = load_questions(f"{name}:{path}", problems=[])
    assert [row.gold_answers for row in rows] == [["x"]] * (1 if name in ("mmlongbench", "vidoseek") else 2)
    assert "\r" not in "".join(row.model_dump_json() for row in rows)


@pytest.mark.parametrize("name", ["questions", "mmlongbench", "vidoseek", "slidevqa", "docbench"])
def test_a_file_that_is_no_utf8_is_named_in_every_reader(tmp_path, name):
    path = tmp_path / "7" / "7_qa.jsonl"
    path.parent.mkdir()
    path.write_bytes(b'{"question": "caf\xe9"}\n')
    with pytest.raises(ValueError, match=r"7_qa\.jsonl is not UTF-8 text \(byte 18"):
        load_questions(f"{name}:{path}")


def test_broken_line_is_named(cases):
    with pytest.raises(ValueError, match=r"broken_line3\.jsonl, line 3"):
        load_questions(f"questions:{cases / 'broken_line3.jsonl'}")


def test_broken_line_of_a_benchmark(cases, tmp_path):
    """DocBench keeps the other lines and reports one; SlideVQA's JSON lines stop, as our own do."""
    path = tmp_path / "3" / "3_qa.jsonl"
    path.parent.mkdir()
    path.write_bytes((cases / "broken_line3.jsonl").read_bytes())
    problems = []
    assert len(load_questions(f"docbench:{path}", problems=problems)) == 3
    assert len(problems) == 1
    assert "3_qa.jsonl, line 3" in problems[0]
    row = {"deck_name": "d", "question": "q", "answer": "a", "evidence_pages": [1]}
    rows = [json.dumps(row | {"qa_id": number}) for number in (1, 2)]
    slides = tmp_path / "test.jsonl"
    slides.write_text("\n".join([*rows, '{"qa_id": 3, "deck']))
    with pytest.raises(ValueError, match=r"test\.jsonl, line 3"):
        load_questions(f"slidevqa:{slides}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question_id": "b"}', "line 2: not a question record: text"),
        ('{"question_id": "b", "text": "t", "gold": []}', "line 2: not a question record: gold"),
        ('{"question_id": "b", "text": "t", "gold_page_ids": ["x"]}', "line 2: 'x' is not a page id"),
        ('{"question_id": "a", "text": "t"}', "id 'a' is used more than once"),
        ("[]", "line 2"),
    ],
)
def test_defective_records_are_named(tmp_path, line, message):
    path = write(tmp_path, '{"question_id": "a", "text": "t"}\n' + line)
    with pytest.raises(ValueError, match=r"q\.json") as error:
        load_questions(f"questions:{path}")
    assert message in str(error.value)


def test_gold_pages_of_our_own_file_are_checked(corpus, tmp_path):
    row = {"question_id": "a", "text": "t", "gold_page_ids": ["x.pdf#page=1", "synthetic_23p.pdf#page=24"]}
    problems = []
    (question,) = load_questions(f"questions:{write(tmp_path, row)}", corpus, problems)
    assert question.gold_page_ids == ["sub/x.pdf#page=1"]
    assert "line 1 (a): page 24 is outside 1..23" in problems[0]


@pytest.mark.parametrize("spec", ["q.json", "nothing:q.json", "questions:missing.jsonl"])
def test_bad_specs(spec):
    with pytest.raises(ValueError, match=r"NAME:PATH|there is no file"):
        load_questions(spec)


# ---------------------------------------------------------------- helpers


def test_distinct_id():
    used = set()
    assert [distinct_id(i, used) for i in ["a", "a~2", "a", "a"]] == ["a", "a~2", "a~3", "a~4"]


def test_a_file_name_that_two_documents_share_is_not_guessed(make_pdf, tmp_path):
    for folder in ("p", "q"):
        make_pdf(tmp_path / "docs" / folder / "x.pdf", ["one"])
    ingest([tmp_path / "docs"], tmp_path / "corpus", dpi=30)
    gold = GoldPages(Corpus.open(tmp_path / "corpus"), [])
    assert gold.doc_id("x.pdf") == "x.pdf"
    assert gold.doc_id("p/x.pdf") == "p/x.pdf"
    assert gold.doc_id("q/x") == "q/x.pdf"
    assert gold.doc_id("docs/q/x.pdf") == "q/x.pdf"
    assert gold.doc_id("r/x.pdf") == "r/x.pdf"
    assert gold.doc_id("x") == "x"


def test_the_real_sample(cases):
    sample = cases.parents[1] / "data" / "mmlongbench" / "samples.json"
    rows = load_questions(f"mmlongbench:{sample}", problems=[])
    assert len(rows) == 134
    assert sum(row.tags["answerable"] for row in rows) == 106
