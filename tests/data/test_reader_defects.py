"""Each reader of a benchmark: any field of any record may be wrong; the rest is kept, the wrong is named."""

from __future__ import annotations

import copy
import json

import pytest

from data.question_files import read_summary
from data.questions import load_questions

BAD = [None, True, 7, 1.5, "", " ", [], {}, [None], ["x"], {"a": 1}, "['x'", "[1.5]", -3, [0], [True]]
MISSING = object()


def mmlongbench(number):
    return {
        "doc_id": "d.pdf",
        "doc_type": "Guidebook",
        "question": f"question {number}?",
        "answer": "['a', 'b']",
        "evidence_pages": "[1]",
        "evidence_sources": "['Chart']",
        "answer_format": "List",
    }


def vidoseek(number):
    meta = {"file_name": "d.pdf", "reference_page": [1], "source_type": "Chart", "query_type": "Single-Hop"}
    return {"uid": f"u{number}", "query": "q?", "reference_answer": "a", "meta_info": meta}


def slidevqa(number):
    return {
        "qa_id": number,
        "deck_name": "d",
        "deck_url": "http://x",
        "question": "q?",
        "answer": "a",
        "arithmetic_expression": "None",
        "evidence_pages": [1],
        "reasoning_type": "Single-Hop",
        "answer_type": "Single-Span",
    }


def docbench(number):
    return {"question": f"question {number}?", "answer": "a", "type": "text-only", "evidence": "e"}


def rl(number):
    return {
        "data_source": "slidevqa",
        "prompt": [{"role": "user", "content": f"Rules. Question: q {number}?"}],
        "ability": "vqa",
        "reward_model": {"style": "model", "ground_truth": "a"},
        "extra_info": {"index": number, "split": "train", "file_name": "d.pdf", "reference_page": [1]},
    }


def own(number):
    return {"question_id": f"q{number}", "text": "t", "gold_answers": ["a"], "gold_page_ids": ["d#page=1"]}


def as_json(path, rows):
    (path / "samples.json").write_text(json.dumps(rows))
    return f"mmlongbench:{path / 'samples.json'}"


def as_examples(path, rows):
    (path / "rag.json").write_text(json.dumps({"examples": rows}))
    return f"vidoseek:{path / 'rag.json'}"


def as_lines(path, rows):
    (path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return f"slidevqa:{path / 'test.jsonl'}"


def as_docbench(path, rows):
    folder = path / "3"
    folder.mkdir()
    (folder / "x.pdf").write_bytes(b"%PDF-1.4")
    (folder / "3_qa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return f"docbench:{path}"


def as_rl_lines(path, rows):
    (path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return f"rl_parquet:{path / 'train.jsonl'}"


READERS = {
    "mmlongbench": (mmlongbench, as_json, "row {n}"),
    "vidoseek": (vidoseek, as_examples, "example {n}"),
    "slidevqa": (slidevqa, as_lines, "row {n}"),
    "docbench": (docbench, as_docbench, "line {n}"),
    "rl_parquet": (rl, as_rl_lines, "row {n}"),
}


def paths_of(record, prefix=()):
    """Every field of a record, as a path of keys; lists are fields of their own."""
    for key, value in record.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from paths_of(value, (*prefix, key))


def changed(record, path, value):
    record = copy.deepcopy(record)
    *parents, key = path
    inner = record
    for parent in parents:
        inner = inner[parent]
    if value is MISSING:
        del inner[key]
    else:
        inner[key] = value
    return record


@pytest.mark.parametrize("name", READERS)
def test_a_wrong_field_is_named_and_the_rest_is_kept(name, tmp_path):
    make, write, record_name = READERS[name]
    good = [make(number) for number in range(3)]
    (tmp_path / "good").mkdir()
    clean: list[str] = []
    expected = load_questions(write(tmp_path / "good", good), problems=clean)
    assert len(expected) == 3
    assert clean == []
    for position, path in enumerate(paths_of(good[1])):
        for number, value in enumerate([*BAD, MISSING]):
            folder = tmp_path / f"{position}-{number}"
            folder.mkdir()
            spec = write(folder, [good[0], changed(good[1], path, value), good[2]])
            problems: list[str] = []
            read = load_questions(spec, problems=problems)
            about = f"{'.'.join(path)} = {value!r}"
            kept = [q for q in read if q.question_id in (expected[0].question_id, expected[2].question_id)]
            assert [q.text for q in kept] == [expected[0].text, expected[2].text], about
            assert all(isinstance(q.text, str) and q.text.strip() for q in read), about
            if len(read) == 2:
                [problem] = problems
                assert "left out" in problem, about
                assert str(folder) in problem, about
                assert record_name.format(n=2) in problem, (about, problem)
                assert path[-1] in problem or path[0] in problem, (about, problem)
            else:
                middle = next(q for q in read if q not in kept)
                assert all(answer.strip() for answer in middle.gold_answers), about
                assert middle.gold_answers, about
                for problem in problems:
                    assert str(folder) in problem, about
                    assert record_name.format(n=2) in problem, (about, problem)
            assert f"{len(read)} question" in read_summary(read, problems)


def mmlongbench_version(rows, answerable):
    """As many rows and answerable ones as a public version of MMLongBench-Doc has."""
    return [
        mmlongbench(n)
        | (
            {}
            if n < answerable
            else {"answer": "Not answerable", "answer_format": "None", "evidence_pages": "[]"}
        )
        for n in range(rows)
    ]


@pytest.mark.parametrize(("rows", "answerable"), [(1091, 847), (1082, 859)])
def test_both_versions_of_mmlongbench_by_their_counts(tmp_path, rows, answerable):
    problems: list[str] = []
    read = load_questions(as_json(tmp_path, mmlongbench_version(rows, answerable)), problems=problems)
    assert len({question.question_id for question in read}) == rows
    assert problems == []
    expected = f"{rows} questions, {answerable} with gold pages, {rows - answerable} unanswerable"
    assert read_summary(read, problems) == expected


def test_records_that_are_no_objects_are_named(tmp_path):
    for name, (make, write, record_name) in READERS.items():
        if name in ("slidevqa", "rl_parquet"):  # rows of a table, which are objects
            continue
        (tmp_path / name).mkdir()
        problems: list[str] = []
        read = load_questions(write(tmp_path / name, [make(0), 3, make(2)]), problems=problems)
        assert len(read) == 2
        [problem] = problems
        assert record_name.format(n=2) in problem
