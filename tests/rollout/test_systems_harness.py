"""Every system through the same commands: one run folder, the same figures, replayed from its record."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from rollout.ask import ask
from rollout.build import AgentConfig
from rollout.evaluate import EvaluateConfig, evaluate
from rollout.manifest import MixedRunError, read_manifest
from rollout.recorder import read_lines
from rollout.replay import replay_run
from rollout.report import write_report
from sft.distill import DistillConfig, distill
from visor.cli import main
from visor.config import load_config


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


def test_the_shipped_protocol_is_the_defaults_written_out(tmp_path):
    path = Path(__file__).parents[2] / "configs" / "eval" / "baselines.yaml"
    given = ["--corpus=c", "--benchmark=b", "--output=o", "--system=react"]
    config = load_config(EvaluateConfig, path, given)
    assert config.system == "react"
    assert config.loop == EvaluateConfig(corpus="c", benchmark="b", output="o").loop
    assert set(yaml.safe_load(path.read_text())["loop"]) == set(type(config.loop).model_fields)
    assert (config.temperature, config.concurrency) == (0.3, 3)
    assert (config.jpeg_quality, config.max_image_bytes) == (75, 38_000)


def test_a_scripted_model_plays_the_dag_agent_from_the_command_line(world, tmp_path, capsys):
    """The script goes on where the prompt is made anew, and starts again with the next question."""
    calls = [
        ("add_search_node", {"id": "s", "parent_ids": ["root"], "query": "banana"}),
        ("summarize_and_memorize", {"summarize": "A page about bananas.", "memorize": [1]}),
        ("add_answer_node", {"parent_ids": ["s"], "answer": "banana"}),
    ]
    replies = [f"<tool_call>{json.dumps({'name': n, 'arguments': a})}</tool_call>" for n, a in calls]
    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps({"question": "colour of banana ?", "replies": replies}) + "\n")
    for _ in range(2):
        command = ["ask", str(world.corpus), "colour of banana ?", "--system", "dag"]
        assert main([*command, "--model", f"script:{script}"]) == 0
        shown = capsys.readouterr().out
        assert "search: banana" in shown
        assert "summary: A page about bananas.  [keeps" in shown
        assert "answer: banana" in shown


class Model:
    """An endpoint that plays each system: native calls where tools are offered, tags elsewhere."""

    def __init__(self):
        self.bodies = []
        model = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                model.bodies.append(body)
                payload = json.dumps(model.answer(body)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *args):
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, body):
        prompt = body["messages"][1]["content"]
        prompt = prompt if isinstance(prompt, str) else prompt[0]["text"]
        word = prompt.lower().split("question")[1].split()[3]
        replied = any(message["role"] == "assistant" for message in body["messages"])
        names = [tool["function"]["name"] for tool in body.get("tools", [])]
        if "add_search_node" in names:
            step = 1 if replied else 2 * prompt.count('"parents"')
            name, arguments = {
                0: ("add_search_node", {"id": "s", "parent_ids": ["root"], "query": word}),
                1: ("summarize_and_memorize", {"summarize": "There.", "memorize": [{"picture": 1}]}),
                2: ("add_answer_node", {"parent_ids": ["s"], "answer": word}),
            }[step]
        elif names:
            name, arguments = ("answer", {"response": word}) if replied else ("search", {"query": word})
        else:
            action = "answer" if replied or "Page 1:" in str(body["messages"]) else "search"
            return chat(f"<think>I read it</think><{action}>{word}</{action}>")
        return chat(None, name, arguments)


def chat(text, name=None, arguments=None):
    message = {"role": "assistant", "content": text}
    if name:
        function = {"name": name, "arguments": json.dumps(arguments)}
        message["tool_calls"] = [{"id": "c1", "type": "function", "function": function}]
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


@pytest.mark.parametrize(("system", "calls"), [("visor", 2), ("vanilla", 1), ("react", 2), ("dag", 3)])
def test_each_system_over_an_endpoint_through_the_real_client(system, calls, config):
    pytest.importorskip("openai")
    model = Model()
    try:
        spec = {
            "system": system,
            "model": f"openai:m@{model.url}",
            "taec": "on" if system == "dag" else "off",
        }
        metrics = evaluate(config.model_copy(update=spec | {"jpeg_quality": 75, "max_image_bytes": 38_000}))
    finally:
        model.server.shutdown()
        model.server.server_close()
    assert (metrics["accuracy"], metrics["mean_calls"], metrics["faults"]) == (0.75, calls, 0)
    assert len(model.bodies) == 4 * calls
    assert ["tools" in body for body in model.bodies] == [system in ("react", "dag")] * len(model.bodies)
    for row in read_lines(Path(config.output, "results.jsonl")):
        assert len(row["image_bytes"]) == calls
        assert row["image_bytes"][-1] > 0
    manifest = read_manifest(config.output)
    assert manifest.sampling["jpeg_quality"] == 75
    assert replay_run(config.output) == (4, [])
