"""The parquet form of RL question files: read as trainers write it, written so that trainers read it."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.corpus import Corpus, ingest
from data.questions import load_questions
from data.rl_parquet import COLUMNS, load, main, write_questions_parquet
from visor.types import Question

RULES = "Think first. For example, <answer> Beijing </answer>. Question: "


def row(index, **changed):
    base = {
        "data_source": "slidevqa",
        "prompt": [{"role": "system", "content": "rules"}, {"role": "user", "content": f"{RULES}how many?"}],
        "ability": "vqa",
        "reward_model": {"style": "model", "ground_truth": "7"},
        "extra_info": {
            "split": "train",
            "index": index,
            "file_name": "fruit.pdf",
            "reference_page": [1],
            "query_type": "Single-Hop_Single-Span",
        },
    }
    return base | changed


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    from reportlab.pdfgen.canvas import Canvas

    folder = tmp_path_factory.mktemp("rl")
    canvas = Canvas(str(folder / "fruit.pdf"), pagesize=(300, 200))
    for number in range(3):
        canvas.drawString(20, 150, f"page {number}")
        canvas.showPage()
    canvas.save()
    assert ingest([folder / "fruit.pdf"], folder / "corpus", workers=1, ocr="off").ok
    return Corpus.open(folder / "corpus")


def test_rows_as_trainers_write_them(corpus, tmp_path):
    path = tmp_path / "train.parquet"
    rows = [row(0), row(1, extra_info=row(1)["extra_info"] | {"reference_page": [3, 9], "index": 1})]
    pq.write_table(pa.Table.from_pylist(rows), path)
    problems: list[str] = []
    for reader in ("rl_parquet", "visual_rag_json", "vidoseek"):
        problems.clear()
        questions = load_questions(f"{reader}:{path}", corpus, problems)
        assert [q.question_id for q in questions] == ["train:0", "train:1"]
        assert questions[0].text == "how many?"
        assert questions[0].gold_answers == ["7"]
        assert [q.gold_page_ids for q in questions] == [["fruit.pdf#page=1"], ["fruit.pdf#page=3"]]
        assert questions[0].tags["hop"] == "single"
        assert questions[0].tags["data_source"] == "slidevqa"
        [problem] = problems
        assert f"{path}, row 2: page 9 is outside 1..3 of fruit.pdf" in problem


@pytest.mark.parametrize(
    ("truth", "answers"),
    [("12.50", ["12.50"]), (7, ["7"]), (["a", "b"], ["a", "b"]), ({"target": ["a"]}, ["a"])],
)
def test_forms_of_the_ground_truth(tmp_path, truth, answers):
    path = tmp_path / "x.parquet"
    reward = {"style": "rule", "ground_truth": truth}
    pq.write_table(pa.Table.from_pylist([row(0, reward_model=reward)]), path)
    [question] = load_questions(f"rl_parquet:{path}")
    assert question.gold_answers == answers


def test_what_is_written_is_read_back_and_has_the_fields_of_the_form(tmp_path):
    questions = [
        Question(
            question_id="a:1",
            text="Question: with a mark? 桥",
            gold_answers=["1,577", "b"],
            gold_page_ids=["x.pdf#page=2", "sub/y.pdf#page=1", "x.pdf#page=3"],
            answer_format="List",
            tags={"hop": "multi", "evidence_sources": ["Chart"], "answerable": True},
        ),
        Question(
            question_id="0", text="q", gold_answers=["Not answerable"], tags={"benchmark": "mmlongbench"}
        ),
    ]
    path = tmp_path / "out.parquet"
    write_questions_parquet(path, questions, split="train")
    assert load_questions(f"rl_parquet:{path}", problems=[]) == questions
    table = pq.read_table(path)
    assert table.column_names == COLUMNS
    first = table.to_pylist()[0]
    assert first["reward_model"] == {"style": "model", "ground_truth": "1,577"}
    assert first["prompt"] == [{"role": "user", "content": questions[0].text}]
    assert (first["extra_info"]["file_name"], first["extra_info"]["reference_page"]) == ("x.pdf", [2, 3])
    assert [r["data_source"] for r in table.to_pylist()] == ["visor", "mmlongbench"]


def test_the_command(cases, tmp_path, capsys):
    output = tmp_path / "out.parquet"
    assert main([f"mmlongbench:{cases / 'mmlb_odd.json'}", "-o", str(output)]) == 0
    printed = capsys.readouterr()
    assert "18 questions" in printed.out
    assert "page 0 is outside" in printed.err
    again = load_questions(f"rl_parquet:{output}", problems=[])
    assert again == load_questions(f"mmlongbench:{cases / 'mmlb_odd.json'}", problems=[])
    assert main(["rl_parquet:nowhere.parquet", "-o", str(output)]) == 2
    assert "there is no file nowhere.parquet" in capsys.readouterr().err


def test_other_columns_and_damaged_files_are_refused(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"question": ["q"]}), path)
    with pytest.raises(ValueError, match=r"x\.parquet: expected the columns data_source, prompt"):
        load_questions(f"rl_parquet:{path}", problems=[])
    path.write_bytes(b"PAR1 nothing")
    with pytest.raises(ValueError, match=r"x\.parquet is not a parquet file"):
        load_questions(f"rl_parquet:{path}", problems=[])


def test_bytes_and_missing_numbers_are_named(tmp_path):
    odd = pa.table({"prompt": ["a"], "reward_model": [{"ground_truth": "x"}], "extra_info": [b"\xff"]})
    pq.write_table(odd, tmp_path / "odd.parquet")
    problems: list[str] = []
    assert load(tmp_path / "odd.parquet", problems=problems) == []
    assert "extra_info is" in problems[0]
    numbers = pa.table(
        {"prompt": ["a"], "reward_model": [{"ground_truth": float("nan")}], "extra_info": [{"question": "q"}]}
    )
    pq.write_table(numbers, tmp_path / "nan.parquet")
    problems = []
    assert load(tmp_path / "nan.parquet", problems=problems) == []
    assert any("ground_truth" in problem for problem in problems)
