"""Every system through the same commands: one run folder, the same figures, replayed from its record."""

import json
from pathlib import Path

import pytest

from rollout.ask import ask
from rollout.build import AgentConfig
from rollout.evaluate import EvaluateConfig, evaluate
from rollout.manifest import MixedRunError, read_manifest
from rollout.recorder import read_lines
from rollout.replay import replay_run
from rollout.report import write_report
from sft.distill import DistillConfig, distill


def vanilla_reply(request):
    word = request.messages[1].text.split()[-2]
    return f"<think>it says so</think><answer>{word}</answer>"


def react_reply(request):
    word = request.messages[1].text.split()[-2]
    turn = sum(message.role == "assistant" for message in request.messages)
    if turn < 2:
        return f"<think>find it</think><search>{word}</search>"
    return f"<think>it says so</think><answer>{word}</answer>"


def dag_reply(request):
    """The two searches, summaries and the answer, in text; the graph in the prompt tells how far it is."""
    prompt = request.messages[1].text
    word = prompt.split("Question: ")[1].split()[2]
    searched = prompt.count('"parents"')
    pending = any(message.role == "assistant" for message in request.messages)
    if pending:
        name, arguments = (
            "summarize_and_memorize",
            {"summarize": "It is there.", "memorize": [{"picture": 1}]},
        )
    elif searched < 2:
        name, arguments = "add_search_node", {"id": f"s{searched}", "parent_ids": ["root"], "query": word}
    else:
        name, arguments = "add_answer_node", {"parent_ids": ["s0"], "answer": word}
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<think>so</think><tool_call>{call}</tool_call>"


REPLIES = {"vanilla": vanilla_reply, "react": react_reply, "dag": dag_reply}


@pytest.fixture
def config(world, tmp_path):
    return EvaluateConfig(
        corpus=str(world.corpus), benchmark=world.questions, output=str(tmp_path / "run"), seed=5
    )


@pytest.mark.parametrize("system", sorted(REPLIES))
def test_a_run_of_each_system(system, config, client):
    client.reply = REPLIES[system]
    config = config.model_copy(update={"system": system})
    metrics = evaluate(config, client)
    assert (metrics["n"], metrics["accuracy"], metrics["completeness"]) == (4, 0.75, 1.0)
    assert metrics["mean_calls"] == {"vanilla": 1, "react": 3, "dag": 5}[system]
    assert metrics["mean_searches"] == {"vanilla": 1, "react": 2, "dag": 2}[system]
    manifest = read_manifest(config.output)
    assert manifest.system == system
    assert manifest.episode["max_calls"] == 20
    rows = list(read_lines(Path(config.output, "results.jsonl")))
    assert {row["system"] for row in rows} == {system}
    assert all(row["admitted_pages"][0] for row in rows)
    assert replay_run(config.output) == (4, [])
    assert replay_run(config.output, recorded=True) == (4, [])
    client.asked.clear()
    assert evaluate(config, client) == metrics
    assert client.asked == []
    with pytest.raises(MixedRunError, match=f"system: '{system}' before, 'visor' now"):
        evaluate(config.model_copy(update={"system": "visor"}), client)
    report = Path(write_report(config.output)).read_text()
    assert ("by the system" in report) is (system == "vanilla")


@pytest.mark.parametrize(("switch", "operators"), [("on", "AMV"), ("A", "A"), ("MV", "MV")])
def test_taec_over_the_dag_agent(switch, operators, config, client):
    client.reply = dag_reply
    config = config.model_copy(update={"system": "dag", "taec": switch})
    metrics = evaluate(config, client)
    assert metrics["accuracy"] == 0.75
    assert read_manifest(config.output).taec["operators"] == operators
    records = list(read_lines(Path(config.output, "trajectories.jsonl")))
    assert {record["meta"]["evidence_policy"]["name"] for record in records} == {f"taec-{operators}"}
    assert replay_run(config.output) == (4, [])
    assert replay_run(config.output, recorded=True) == (4, [])
    with pytest.raises(MixedRunError, match=f"taec: {operators} → off"):
        evaluate(config.model_copy(update={"taec": "off"}), client)


def test_other_settings_of_the_loop_are_another_run(config, client):
    client.reply = react_reply
    config = config.model_copy(update={"system": "react"})
    evaluate(config, client)
    fewer = config.model_copy(update={"loop": config.loop.model_copy(update={"pages_per_search": 2})})
    with pytest.raises(MixedRunError, match=r"episode\.pages_per_search: 5 before, 2 now"):
        evaluate(fewer, client)


def test_ask_shows_the_turns_of_any_system(world, client):
    client.reply = vanilla_reply
    shown = []
    config = AgentConfig(corpus=str(world.corpus), system="vanilla")
    trajectory = ask(config, "colour of banana ?", client=client, show=shown.append)
    assert trajectory.answer == "banana"
    assert "by the system" in shown[0]
    assert "search: colour of banana ?" in shown[0]
    assert "answer: banana" in shown[1]


def test_a_layer_over_vanilla_and_an_unknown_system_are_refused(world, client):
    with pytest.raises(ValueError, match="not over vanilla"):
        ask(AgentConfig(corpus=str(world.corpus), system="vanilla", taec="on"), "q", client=client)
    with pytest.raises(ValueError, match="unknown system 'rag'"):
        AgentConfig(corpus="x", system="rag")


def test_sft_data_is_made_with_visor_only(world, client, tmp_path):
    config = DistillConfig(
        corpus=str(world.corpus), questions=world.questions, output=str(tmp_path / "t.jsonl"), system="react"
    )
    with pytest.raises(ValueError, match="trajectories of the system visor"):
        distill(config, client)


def test_records_written_before_these_systems_are_read(config, client):
    """A trajectory, a row and a manifest without the fields that other systems brought."""
    evaluate(
        config.model_copy(update={"episode": config.episode.model_copy(update={"prompts": "tiny"})}), client
    )
    folder = Path(config.output)
    records = list(read_lines(folder / "trajectories.jsonl"))
    for record in records:
        for turn in record["turns"]:
            del turn["by_system"], turn["completion"]["tool_calls"], turn["completion"]["image_bytes"]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "trajectories.jsonl").write_text(text)
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in ("loop", "jpeg_quality", "max_image_bytes"):
        del manifest["arguments"][name]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert replay_run(folder) == (4, [])
