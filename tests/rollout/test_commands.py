"""The run subcommands through `visor.cli.main`, with a scripted policy and a tiny real tokenizer."""

import json
import shutil
from pathlib import Path

import pytest

from rollout.compare_folders import load_rows
from rollout.evaluate import EvaluateConfig, evaluate
from rollout.inspect_row import build_row, find_trajectory, row_text
from rollout.recorder import read_lines, rewrite
from visor.cli import main
from visor.retrieval.index import default_index_path


@pytest.fixture
def run(world, tmp_path, client):
    config = EvaluateConfig(
        corpus=str(world.corpus),
        benchmark=world.questions,
        output=str(tmp_path / "run"),
        episode={
            "prompts": "tiny",
            "max_turns": 5,
            "page_min_pixels": 784,
            "page_max_pixels": 4 * 784,
            "crop_min_pixels": 784,
            "crop_max_pixels": 4 * 784,
        },
    )
    evaluate(config, client)
    return tmp_path / "run"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Tokenizer and image processor of a tiny policy; a row needs no weights."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from visor.models.tiny import build_tokenizer

    folder = tmp_path_factory.mktemp("checkpoint")
    build_tokenizer(["find apple the page names cherry it says so"] * 3, 400).save_pretrained(folder)
    Qwen2VLImageProcessorPil(min_pixels=784, max_pixels=784 * 64).save_pretrained(folder)
    return folder


def test_report_and_compare(run, tmp_path, capsys):
    out = tmp_path / "report.html"
    assert main(["report", str(run), "-o", str(out), "--limit", "1"]) == 0
    assert out.is_file()
    other = tmp_path / "other"
    other.mkdir()
    for name in ("manifest.json", "results.jsonl"):
        (other / name).write_bytes((run / name).read_bytes())
    capsys.readouterr()
    assert main(["compare", str(run), str(other), "--format", "json", "--resamples", "100"]) == 0
    comparison = json.loads(capsys.readouterr().out)
    assert comparison["common_questions"] == 4
    assert comparison["differences"][0]["p_value"] == 1.0
    assert main(["compare", str(run)]) == 2
    assert "at least two runs" in capsys.readouterr().err
    assert main(["compare", str(run), str(other), "--resamples", "0"]) == 2
    assert "resamples is 0; the bootstrap needs at least 1" in capsys.readouterr().err


def test_compare_writes_its_tables(run, tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    (other / "manifest.json").write_bytes((run / "manifest.json").read_bytes())
    rows = list(read_lines(run / "results.jsonl"))
    rewrite(other / "results.jsonl", [row | {"verdict": False} for row in rows])
    prices = tmp_path / "prices.yaml"
    prices.write_text("models:\n  default: {prompt: 1.0, completion: 2.0}\n")
    markdown, figures = tmp_path / "tables.md", tmp_path / "figures.json"
    command = ["compare", str(run), str(other), "--resamples", "50", "--prices", str(prices)]
    assert main([*command, "--markdown", str(markdown), "--json", str(figures), "--brief"]) == 0
    assert "Coverage and use" not in capsys.readouterr().out
    assert "### Coverage and use" in markdown.read_text()
    record = json.loads(figures.read_text())
    analyses = {one["name"]: one["rows"] for one in record["analyses"]}
    assert [row["Δ accuracy"] and row["Δ accuracy"]["value"] for row in analyses["coverage"]] == [None, -0.75]
    assert analyses["tokens"][0]["USD for 1000 questions"]["value"] > 0
    assert record["lacking"]["samples"] == "needs runs with several samples a question"
    assert main([*command, "--only", "depth", "--reference", str(other)]) == 0
    shown = capsys.readouterr().out
    assert "Depth: by the run's own number of searches" in shown
    assert "Coverage and use" not in shown
    assert main([*command, "--reference", str(tmp_path / "nobody")]) == 2
    assert "nobody is none of the runs" in capsys.readouterr().err


def test_rows_of_an_earlier_version_are_completed_from_their_trajectories(run):
    now = load_rows(run)
    later = ("first_retrieved", "completed_searches", "slot_calls", "prompt_tokens", "image_tokens")
    rows = [{k: v for k, v in r.items() if k not in later} for r in read_lines(run / "results.jsonl")]
    rewrite(run / "results.jsonl", rows)
    assert load_rows(run) == now
    assert now[0].first_retrieved
    (run / "trajectories.jsonl").unlink()
    assert load_rows(run)[0].first_retrieved is None
    assert load_rows(run)[0].searches == 1


def test_report_of_a_corpus_that_is_none(run, tmp_path, capsys):
    assert main(["report", str(run), "--corpus", str(tmp_path / "nope")]) == 2
    assert "nope is not a corpus" in capsys.readouterr().err
    assert not (run / "report.html").exists()


def test_replay_of_another_corpus_takes_its_index(run, world, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(world.corpus, other)
    shutil.rmtree(other / "index")
    assert main(["replay", str(run), "--corpus", str(other)]) == 2
    assert f"{other / 'index' / 'bm25'} holds no index" in capsys.readouterr().err
    own = str(default_index_path(world.corpus))
    assert main(["replay", str(run), "--corpus", str(other), "--index", own]) == 0
    assert main(["index", str(other)]) == 0
    assert main(["replay", str(run), "--corpus", str(other)]) == 0
    assert main(["replay", str(run), "--corpus", str(world.corpus)]) == 0


def test_a_run_over_lost_images_does_not_start(world, tmp_path, client):
    corpus = tmp_path / "corpus"
    shutil.copytree(world.corpus, corpus)
    next((corpus / "images").rglob("*.jpg")).unlink()
    config = EvaluateConfig(
        corpus=str(corpus),
        benchmark=world.questions,
        output=str(tmp_path / "out"),
        episode={"prompts": "tiny"},
    )
    with pytest.raises(ValueError, match="lacks 1 of its 4 page images"):
        evaluate(config, client)
    assert not (tmp_path / "out").exists()


def test_replay_exit_codes(run, capsys):
    assert main(["replay", str(run)]) == 0
    records = list(read_lines(run / "trajectories.jsonl"))
    records[0]["turns"][0]["query"] = "other"
    rewrite(run / "trajectories.jsonl", records)
    capsys.readouterr()
    assert main(["replay", str(run), "--recorded-retrieval"]) == 1
    output = capsys.readouterr()
    assert "turn 1: query: recorded 'other'" in output.out
    assert "4 trajectories replayed, 1 differ" in output.err


def test_ask_needs_a_model_and_a_known_setting(world, capsys):
    assert main(["ask", str(world.corpus), "why ?"]) == 2
    assert "either --model" in capsys.readouterr().err
    assert main(["ask", str(world.corpus), "why ?", "--set", "episode.windw=3"]) == 2
    assert "episode.window" in capsys.readouterr().err


def test_inspect_row_marks_what_is_trained(run, world, checkpoint, capsys):
    arguments = ["inspect-row", str(run), "--checkpoint", str(checkpoint), "--corpus", str(world.corpus)]
    assert main([*arguments, "--question", "q2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("q2/0: ")
    assert "pads of 2 images (#)" in lines[0]
    assert lines[1] == "replies were known as text only and tokenised here"
    tokens = lines[2:]
    pads = [line for line in tokens if " #  " in line]
    assert len(pads) == 2
    assert "box [" in pads[1]
    trained = "".join(eval_text(line) for line in tokens if " +  " in line)
    records = {r["question_id"]: r for r in read_lines(run / "trajectories.jsonl")}
    replies = [turn["completion"]["text"] for turn in records["q2"]["turns"]]
    assert trained == "".join(f"{reply}<|im_end|>" for reply in replies)
    assert main([*arguments, "--question", "q2", "--turn", "3"]) == 0
    assert capsys.readouterr().out.startswith("q2/0 turn 3: ")
    assert main([*arguments, "--turn", "9"]) == 2
    assert "3 turns" in capsys.readouterr().err
    assert main([*arguments, "--question", "nobody"]) == 2


def eval_text(line):
    """The token's text out of its printed form."""
    import ast

    return ast.literal_eval(line.split(" +  ")[1])


def test_row_text_counts_add_up_and_shows_log_probabilities(run, world, checkpoint):
    from data.corpus import Corpus
    from visor.env.crop import ImageCutter
    from visor.models.loading import load_processor

    trajectory = find_trajectory(run)
    renderer = load_processor(checkpoint).renderer()
    for turn in trajectory.turns:
        turn.completion.token_ids = renderer.reply_ids(turn.completion.text)
        turn.completion.logprobs = [-0.25] * len(turn.completion.token_ids)
    row = build_row(trajectory, renderer, ImageCutter(Corpus.open(world.corpus)))
    text = row_text(row, renderer)
    total, trained, masked = (
        int(text.split(word)[0].split()[-1]) for word in (" tokens", " trained", " masked")
    )
    pads = int(text.split(" pads of 2 images")[0].split()[-1])
    assert total == len(row.input_ids) == trained + masked + pads
    assert text.count("-0.2500") == trained == sum(row.loss_mask)


def test_ask_takes_the_file_of_an_evaluation(world, tmp_path, capsys):
    script, shipped = tmp_path / "script.jsonl", Path(__file__).parents[2] / "configs" / "eval" / "visor.yaml"
    replies = ["<think>it is known</think><answer>red</answer>"]
    script.write_text(json.dumps({"question": "colour of apple ?", "replies": replies}) + "\n")
    arguments = ["ask", str(world.corpus), "colour of apple ?", "--model", f"script:{script}"]
    arguments += ["--prompts", "tiny", "--config"]
    assert main([*arguments, str(shipped)]) == 0
    assert "answer: red" in capsys.readouterr().out
    misspelt = tmp_path / "misspelt.yaml"
    misspelt.write_text("temprature: 0\n")
    assert main([*arguments, str(misspelt)]) == 2
    assert "did you mean 'temperature'" in capsys.readouterr().err
