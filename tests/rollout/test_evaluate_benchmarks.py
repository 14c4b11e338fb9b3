"""Evaluation on the benchmarks' own files, over corpora that `visor ingest --format` made."""

import io
import json
from pathlib import Path

import pytest

from data.benchmarks import ingest_as
from data.corpus import Corpus
from rollout.evaluate import EvaluateConfig, evaluate
from visor.retrieval.index import build_index, default_index_path

CASES = Path(__file__).resolve().parents[2].parent / "shared" / "cases" / "files"


def draw(path, texts):
    from reportlab.pdfgen.canvas import Canvas

    path.parent.mkdir(parents=True, exist_ok=True)
    canvas = Canvas(str(path), pagesize=(100, 140))
    for text in texts:
        canvas.drawString(10, 50, text)
        canvas.showPage()
    canvas.save()


def run(client, tmp_path, format_name, source, benchmark):
    """Prepare a benchmark, index it and evaluate a client on `benchmark`; metrics and result rows by id."""
    corpus = tmp_path / "corpus"
    assert ingest_as(format_name)([source], corpus, dpi=40, ocr="off").ok
    opened = Corpus.open(corpus)
    if any(page.text for page in opened.pages()):
        build_index(opened, default_index_path(corpus))
    config = EvaluateConfig(
        corpus=str(corpus),
        benchmark=benchmark.format(corpus=corpus, source=source),
        output=str(tmp_path / "run"),
        episode={"prompts": "tiny", "max_turns": 4},
    )
    metrics = evaluate(config, client)
    lines = (tmp_path / "run" / "results.jsonl").read_text().splitlines()
    return metrics, {row["question_id"]: row for row in map(json.loads, lines)}, len(lines)


def answers(text):
    return lambda request: f"<think>done</think><answer>{text}</answer>"


@pytest.mark.parametrize(
    "benchmark", ["mmlongbench:{source}/samples.json", "questions:{corpus}/questions.jsonl"]
)
def test_case_c2_equal_rows_are_two_results(client, tmp_path, benchmark):
    if not CASES.is_dir():
        pytest.skip("the shared cases are not beside this checkout")
    source = tmp_path / "MMLongBench-Doc"
    draw(source / "documents" / "synthetic_23p.pdf", [f"page {n}" for n in range(1, 24)])
    (source / "samples.json").write_bytes((CASES / "mmlb_odd.json").read_bytes())
    client.reply = answers("3")
    metrics, rows, lines = run(client, tmp_path, "mmlongbench", source, benchmark)
    assert metrics["n"] == metrics["questions"] == len(rows) == lines == 18
    same = [row for question_id, row in rows.items() if question_id.endswith("~2")]
    assert len(same) == 1
    assert metrics["accuracy"] == pytest.approx(2 / 18)


def test_docbench(client, tmp_path):
    source = tmp_path / "DocBench"
    draw(source / "7" / "paper.pdf", ["apples", "pears"])
    questions = [{"question": f"what {n}?", "answer": str(n), "type": "text-only"} for n in (1, 2)]
    (source / "7" / "7_qa.jsonl").write_text("\n".join(map(json.dumps, questions)))
    client.reply = answers("2")
    metrics, rows, _ = run(client, tmp_path, "docbench", source, "docbench:{source}")
    assert (metrics["n"], metrics["accuracy"], metrics["n_gold"]) == (2, 0.5, 0)
    assert all(question_id.startswith("7:") for question_id in rows)


def test_page_images_of_a_pdf_that_the_questions_name(client, tmp_path):
    """The corpus has documents `paper` and `other`, the questions name `paper.pdf`; captions are searched."""
    from PIL import Image

    source = tmp_path / "ViDoSeek"
    source.mkdir()
    for name in ("paper_1", "paper_2", "other_1"):
        buffer = io.BytesIO()
        Image.new("RGB", (60, 80), (len(name), 9, 9)).save(buffer, "PNG")
        (source / f"{name}.png").write_bytes(buffer.getvalue())
    meta = {"file_name": "paper.pdf", "reference_page": [2]}
    example = {"uid": 1, "query": "which apple ?", "reference_answer": "apple", "meta_info": meta}
    (source / "vidoseek.json").write_text(json.dumps({"examples": [example]}))

    from data.caption_file import CaptionFile, CaptionLine, merge

    corpus = tmp_path / "corpus"
    assert ingest_as("vidoseek")([source], corpus, ocr="off").ok
    with CaptionFile(corpus) as file:
        for page in Corpus.open(corpus).pages():
            caption = "an apple" if page.page_id == "paper#page=2" else "a pear"
            line = CaptionLine(
                page_id=page.page_id,
                image_sha256=page.sha256,
                caption=caption,
                model="m",
                prompt_sha256="",
                max_pixels=1,
                max_tokens=1,
            )
            file.append(line)
        merge(corpus, file, line.recipe)
    build_index(Corpus.open(corpus), default_index_path(corpus))
    config = EvaluateConfig(
        corpus=str(corpus),
        benchmark=f"vidoseek:{source / 'vidoseek.json'}",
        output=str(tmp_path / "run"),
        episode={"prompts": "tiny", "max_turns": 4},
    )
    metrics = evaluate(config, client)
    assert (metrics["accuracy"], metrics["completeness"]) == (1.0, 1.0)
