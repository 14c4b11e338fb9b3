import json
import re
from pathlib import Path

import pytest

from rewards import REWARDS
from rewards.judge import RuleJudge, Verdict
from rollout import evaluate as module
from rollout.evaluate import EvaluateConfig, evaluate, main
from rollout.manifest import MixedRunError, read_manifest
from rollout.recorder import read_lines
from rollout.results import result_row
from visor.config import load_config
from visor.types import Completion, Question, RewardBreakdown, Trajectory


@pytest.fixture
def config(world, tmp_path):
    return EvaluateConfig(
        corpus=str(world.corpus),
        benchmark=world.questions,
        output=str(tmp_path / "run"),
        episode={"prompts": "tiny", "max_turns": 5},
    )


def ids(config, name):
    return [json.loads(line)["question_id"] for line in Path(config.output, name).read_text().splitlines()]


def test_a_run_writes_its_four_files_and_the_right_figures(config, client):
    metrics = evaluate(config, client)
    assert sorted(ids(config, "trajectories.jsonl")) == ["q1", "q2", "q3", "q4"]
    assert sorted(ids(config, "results.jsonl")) == ["q1", "q2", "q3", "q4"]
    assert metrics["accuracy"] == 0.75
    assert metrics["completeness"] == 1.0
    assert metrics["no_verification_share"] == 1.0
    assert metrics["box_usage"] == 1.0
    assert metrics["by_tag"]["hop"]["multi"]["accuracy"] == 0.5
    assert json.loads(Path(config.output, "metrics.json").read_text()) == metrics
    manifest = read_manifest(config.output)
    assert manifest.model == {"kind": "given", "name": "scripted"}
    assert manifest.corpus["pages"] == 4
    assert len(manifest.index["retriever_fingerprint"]) == 16
    assert (manifest.judge, manifest.episode["max_turns"]) == ("rule", 5)


def test_resume_asks_only_what_is_missing(config, client):
    """Case H2 through the whole command: a kill tears the last trajectory and loses a result row."""
    evaluate(config, client)
    trajectories = Path(config.output, "trajectories.jsonl")
    trajectories.write_bytes(trajectories.read_bytes()[:-50])
    lost = ids(config, "results.jsonl")[-1]
    Path(config.output, "results.jsonl").write_text("")
    client.asked.clear()
    metrics = evaluate(config.model_copy(update={"max_concurrency": 1, "batch_size": 7}), client)
    number = int(lost[1:])
    assert {text.split()[-2] for text in client.asked} == {
        ["apple", "banana", "cherry", "damson"][number - 1]
    }
    assert sorted(ids(config, "trajectories.jsonl")) == ["q1", "q2", "q3", "q4"]
    assert sorted(ids(config, "results.jsonl")) == ["q1", "q2", "q3", "q4"]
    assert metrics["n"] == 4
    client.asked.clear()
    assert evaluate(config, client) == metrics
    assert client.asked == []


def test_limit_and_samples(config, client):
    evaluate(config.model_copy(update={"limit": 2}), client)
    metrics = evaluate(config.model_copy(update={"samples": 2}), client)
    assert (metrics["n"], metrics["questions"]) == (8, 4)
    assert len(client.asked) == 8 * 3


def test_a_question_that_failed_is_asked_again_and_counted_until_then(config, client):
    working = client.reply

    def failing(request):
        if "banana" in request.messages[1].text:
            raise ConnectionError("endpoint down")
        return working(request)

    client.reply = failing
    metrics = evaluate(config, client)
    assert (metrics["n"], metrics["failed"], metrics["faults"], metrics["unscored"]) == (4, 1, 1, 1)
    assert metrics["accuracy"] == 0.5
    client.asked.clear()
    kept = evaluate(config.model_copy(update={"retry_failed": False}), client)
    assert (kept["failed"], client.asked) == (1, [])
    client.reply = working
    assert evaluate(config, client)["accuracy"] == 0.75
    assert {text.split()[-2] for text in client.asked} == {"banana"}
    assert len(ids(config, "results.jsonl")) == 4


def test_an_answer_without_a_verdict_is_judged_again_but_not_asked_again(config, client, monkeypatch):
    """Case G2: an outage of the judge is no verdict, and the next run asks the judge again."""

    class Down(RuleJudge):
        async def averdict(self, question, gold_answers, answer):
            return Verdict(None, error="503")

    monkeypatch.setattr(module, "make_judge", lambda *_: Down())
    metrics = evaluate(config, client)
    assert (metrics["accuracy"], metrics["unjudged"], metrics["unscored"]) == (0.0, 4, 4)
    monkeypatch.setattr(module, "make_judge", lambda *_: RuleJudge())
    client.asked.clear()
    metrics = evaluate(config, client)
    assert (metrics["accuracy"], metrics["unjudged"], metrics["unscored"]) == (0.75, 0, 0)
    assert client.asked == []
    rewards = [record["reward"]["verdict"] for record in read_lines(f"{config.output}/trajectories.jsonl")]
    assert sorted(rewards) == [False, True, True, True]


def test_a_failed_row_that_is_not_asked_again_stays_on_record(config, client):
    def down(request):
        raise ConnectionError("endpoint down")

    working, client.reply = client.reply, down
    assert evaluate(config, client)["faults"] == 4
    client.reply = working
    metrics = evaluate(config.model_copy(update={"limit": 1}), client)
    assert (metrics["n"], metrics["faults"]) == (4, 3)
    assert {text.split()[-2] for text in client.asked[4:]} == {"apple"}


def test_the_named_reward_scores_and_is_not_mixed_with_another(config, client, monkeypatch):
    async def quarter(trajectory, question, judge):
        return RewardBreakdown(total=0.25, judge=judge.name, verdict=True)

    monkeypatch.setitem(REWARDS, "quarter", quarter)
    named = config.model_copy(update={"reward": "quarter"})
    assert evaluate(named, client)["mean_reward"] == 0.25
    with pytest.raises(MixedRunError, match="scored with the reward 'quarter', not 'visor'"):
        evaluate(config, client)
    evaluate(config.model_copy(update={"allow_mixed": True}), client)
    with pytest.raises(ValueError, match=r"unknown reward 'q'; known: quarter, visor"):
        evaluate(config.model_copy(update={"reward": "q"}), client)


def test_another_run_is_refused_by_name_unless_allowed(config, client, capsys):
    evaluate(config, client)
    other = config.model_copy(update={"temperature": 0.9, "taec": "A"})
    with pytest.raises(MixedRunError, match=r"sampling\.temperature: 0\.1 before, 0\.9 now") as error:
        evaluate(other, client)
    assert "taec: off → A\n" in str(error.value)
    assert "taec." not in str(error.value)
    evaluate(other.model_copy(update={"allow_mixed": True}), client)
    assert "mixed run: sampling.temperature" in capsys.readouterr().err
    with pytest.raises(ValueError, match="not empty"):
        evaluate(config.model_copy(update={"resume": False}), client)


def test_prompt_ids_are_written_when_asked_for(config, client, tmp_path):
    words, reply = client.reply, Completion(text="", prompt_token_ids=[1, 2], token_ids=[3])

    async def complete(request):
        return reply.model_copy(update={"text": words(request)})

    client.complete = complete
    for wanted, stored in ((False, None), (True, [1, 2])):
        output = str(tmp_path / str(wanted))
        evaluate(config.model_copy(update={"prompt_ids": wanted, "output": output}), client)
        record = next(read_lines(Path(output, "trajectories.jsonl")))
        completion = record["turns"][0]["completion"]
        assert (completion["prompt_token_ids"], completion["token_ids"]) == (stored, [3])
        row = next(read_lines(Path(output, "results.jsonl")))
        assert (row["prompt_tokens"], row["new_tokens"]) == (6, 3), "three calls, counted either way"
        question = Question(question_id=row["question_id"], text=row["question"])
        again = result_row(Trajectory.model_validate(record), question)
        assert again.prompt_tokens == 6, "and again from the stored trajectory"


def test_a_run_with_another_retriever_does_not_start(config, client):
    with pytest.raises(ValueError, match="expected 0123"):
        evaluate(config.model_copy(update={"expected_retriever": "0123"}), client)
    assert client.asked == []


def test_a_spent_budget_stops_and_the_same_command_goes_on(config, client, capsys):
    """Three calls a question; the estimate of one is far over 1 token, so each command asks one question."""
    one = config.model_copy(update={"budget": 1, "max_concurrency": 1})
    for asked in (1, 2):
        metrics = evaluate(one, client)
        assert metrics["n"] == asked
        assert len(client.asked) == 3 * asked
        assert f"{4 - asked} questions are not asked" in capsys.readouterr().err
    assert evaluate(config.model_copy(update={"budget": 10**9}), client)["n"] == 4
    assert "budget" not in capsys.readouterr().err


def test_taec_on_off_and_yaml_booleans(config, client, tmp_path):
    assert EvaluateConfig.model_validate(config.model_dump() | {"taec": True}).taec == "on"
    assert EvaluateConfig.model_validate(config.model_dump() | {"taec": False}).taec == "off"
    evaluate(config.model_copy(update={"taec": "on", "output": str(tmp_path / "on")}), client)
    record = next(read_lines(tmp_path / "on" / "trajectories.jsonl"))
    assert record["meta"]["evidence_policy"]["operators"] == "AM"


def test_the_command_line(config, world, tmp_path, capsys):
    arguments = [
        *("--corpus", str(world.corpus), "--benchmark", world.questions),
        *("--output", str(tmp_path / "cli"), "--episode.prompts", "tiny"),
    ]
    assert main(arguments) == 2
    assert "either --model" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*arguments, "--temprature", "0"])
    assert "temperature" in capsys.readouterr().err


def test_a_script_and_a_shipped_config_run_the_whole_command(world, tmp_path, capsys):
    """`script:FILE` and the TAEC file, whose bare `on` YAML reads as true."""
    script = tmp_path / "script.jsonl"
    lines = [
        {
            "question": f"colour of {word} ?",
            "replies": [
                f"<think>find</think><search>{word}</search>",
                f"<think>the answer is {word} . verify it</think><search>colour of {word} ?</search>",
                f"<think>confirmed</think><answer>{word}</answer>",
            ],
        }
        for word in ("apple", "banana", "cherry", "damson")
    ]
    script.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shipped = Path(__file__).parents[2] / "configs" / "eval" / "taec.yaml"
    arguments = [
        *("--config", str(shipped), "--model", f"script:{script}", "--corpus", str(world.corpus)),
        *("--benchmark", world.questions, "--output", str(tmp_path / "run"), "--episode.prompts", "tiny"),
    ]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert re.search(r"accuracy +0\.750", printed)
    assert re.search(r"n +4", printed)
    manifest = read_manifest(tmp_path / "run")
    assert manifest.model["kind"] == "script"
    assert manifest.taec["operators"] == "AM"
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["mean_searches"] == 2.0


def test_the_shipped_visor_config_is_the_default_written_out():
    config = load_config(
        EvaluateConfig,
        Path(__file__).parents[2] / "configs" / "eval" / "visor.yaml",
        ["--corpus", "c", "--benchmark", "questions:q", "--output", "o"],
    )
    assert config == EvaluateConfig(corpus="c", benchmark="questions:q", output="o")


def test_a_run_that_says_nothing_exits_1_with_its_reasons(
    config, world, tmp_path, client, monkeypatch, capsys
):
    working, original = client.reply, evaluate
    monkeypatch.setattr(module, "evaluate", lambda config: original(config, client))
    arguments = [
        *("--corpus", str(world.corpus), "--benchmark", world.questions, "--episode.prompts", "tiny"),
        *("--output", str(tmp_path / "run"), "--episode.max_turns", "5"),
    ]

    def down(request):
        raise ConnectionError("endpoint\ndown")

    client.reply = down
    assert main(arguments) == 1
    shown = capsys.readouterr().err
    assert re.search(r"4 × fault: policy: ConnectionError: .*endpoint down", shown)
    assert "all 4 rows ended with a fault" in shown

    class Silent(RuleJudge):
        async def averdict(self, question, gold_answers, answer):
            return Verdict(None, error="503")

    client.reply = working
    monkeypatch.setattr(module, "make_judge", lambda *_: Silent())
    assert main(arguments) == 1
    shown = capsys.readouterr().err
    assert re.search(r"4 × unjudged: .*503", shown)
    assert "none of the 4 answers got a verdict" in shown
    monkeypatch.setattr(module, "make_judge", lambda *_: RuleJudge())
    assert main(arguments) == 0
    assert "×" not in capsys.readouterr().err


def test_rows_without_a_manifest_are_refused_unless_allowed(config, client):
    evaluate(config, client)
    manifest = Path(config.output, "manifest.json")
    manifest.unlink()
    client.asked.clear()
    with pytest.raises(MixedRunError, match=r"run holds rows in trajectories.jsonl but no .*--allow_mixed"):
        evaluate(config, client)
    assert not manifest.exists()
    assert evaluate(config.model_copy(update={"allow_mixed": True}), client)["n"] == 4
    assert client.asked == []


def test_an_output_that_is_a_file_is_one_line(world, tmp_path, capsys):
    script, output = tmp_path / "script.jsonl", tmp_path / "file"
    script.write_text(json.dumps({"question": "colour of apple ?", "replies": ["x"]}) + "\n")
    output.write_text("kept")
    arguments = ["--model", f"script:{script}", "--corpus", str(world.corpus), "--benchmark", world.questions]
    assert main([*arguments, "--output", str(output), "--episode.prompts", "tiny"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "file is a file; name a run folder" in line
    assert output.read_text() == "kept"
