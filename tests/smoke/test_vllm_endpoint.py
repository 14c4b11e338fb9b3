"""The whole evaluation harness against a real vLLM server on the CPU, on real pages, with the tiny policy.

Accuracy says nothing here: the policy cannot read real pages. What is shown is that every system runs over
the engine, that rows, costs and records are whole, that a killed run goes on, and that the commands over runs
work.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from rollout.recorder import read_lines

ROOT = Path(__file__).parents[2]
POLICY = ROOT / "data" / "slide_policy"
SAMPLE = ROOT.parent / "shared" / "data" / "mmlongbench"
DOCUMENTS = ("watch_d.pdf", "PIP_Seniors-and-Tech-Use_040314.pdf")
LIMIT = 3
# vLLM names three sections; Transformers lets the sixteen of the policy take turns, which is the same.
ROPE = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
SETTINGS = """
episode: {prompts: tiny, max_turns: 4, page_min_pixels: 50176, page_max_pixels: 100352,
          crop_min_pixels: 50176, crop_max_pixels: 100352}
loop: {max_calls: 3, pages_per_search: 3, page_min_pixels: 12544, page_max_pixels: 50176,
       memory_pixels: 100352, captions: false}
max_new_tokens: 48
judge: mmlongbench
jpeg_quality: 75
max_image_bytes: 38000
"""
SYSTEMS = {
    "vanilla": ("--system", "vanilla"),
    "react": ("--system", "react"),
    "react-text": ("--system", "react", "--loop.protocol", "text"),
    "dag": ("--system", "dag", "--loop.tool_choice", "required"),
    "dag-taec": ("--system", "dag", "--taec", "on"),
    "dag-text": ("--system", "dag", "--loop.protocol", "text"),
    "visor": ("--system", "visor"),
    "visor-taec": ("--system", "visor", "--taec", "on"),
}

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(not SAMPLE.is_dir(), reason="the sample of MMLongBench-Doc is not beside the project"),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """Address of a server of its own, from start-up to the last test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(POLICY)),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
        *("--enforce-eager", "--dtype", "float32", "--max-model-len", "4096"),
        # A prompt in pieces and a seed of its own do not go together on a CPU.
        *("--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192"),
        *("--limit-mm-per-prompt", '{"image": 16}', "--enable-auto-tool-choice"),
        *("--tool-call-parser", "hermes"),
        *("--hf-overrides", json.dumps({"text_config": {"rope_parameters": ROPE}})),
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        for _ in range(900):
            assert server.poll() is None, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()


def run(*words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A command of the project in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OPENAI_API_KEY": "none"}
    command = [sys.executable, "-m", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert not check or done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


@pytest.fixture(scope="module")
def world(url, tmp_path_factory):
    """(folder, arguments that all runs share): a corpus of two real documents and their questions."""
    folder = tmp_path_factory.mktemp("real")
    documents = [SAMPLE / "documents" / name for name in DOCUMENTS]
    run("visor.cli", "ingest", *documents, "-o", folder / "corpus", "--workers", 1)
    run("visor.cli", "index", folder / "corpus", "--retriever", "bm25")
    rows = json.loads((SAMPLE / "samples.json").read_text())
    (folder / "samples.json").write_text(json.dumps([row for row in rows if row["doc_id"] in DOCUMENTS]))
    (folder / "common.yaml").write_text(SETTINGS)
    shared = [
        *("--config", folder / "common.yaml", "--model", f"openai:tiny@{url}"),
        *("--corpus", folder / "corpus", "--benchmark", f"mmlongbench:{folder / 'samples.json'}"),
    ]
    return folder, shared


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_runs_over_the_engine(world, name):
    folder, shared = world
    run("rollout.evaluate", *shared, *SYSTEMS[name], "--limit", LIMIT, "--output", folder / name)
    metrics = json.loads((folder / name / "metrics.json").read_text())
    assert (metrics["n"], metrics["faults"]) == (LIMIT, 0)
    for trajectory in read_lines(folder / name / "trajectories.jsonl"):
        asked = [turn["completion"] for turn in trajectory["turns"] if not turn.get("by_system")]
        assert asked
        assert all(completion["prompt_tokens"] > 0 for completion in asked)
        assert all(completion["completion_tokens"] >= 1 for completion in asked)
        if name in ("react", "dag", "dag-taec"):
            assert trajectory["meta"]["protocol"]["name"] == "native"
        if name.endswith("text"):
            assert trajectory["meta"]["protocol"] == {"name": "text", "reason": "as set"}
        if name == "vanilla":
            assert asked[0]["image_bytes"] > 0
        if name == "dag":  # the engine makes the policy call a tool, or write one until its reply is full
            begun = [completion["tool_calls"] or "<tool_call>" in completion["text"] for completion in asked]
            assert any(begun)


def test_a_killed_run_goes_on(world):
    folder, shared = world
    output = folder / "killed"
    words = [*shared, "--system", "visor", "--limit", 6, "--max_concurrency", 1, "--output", output]
    command = [sys.executable, "-m", "rollout.evaluate", *map(str, words)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OPENAI_API_KEY": "none"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    rows = output / "trajectories.jsonl"
    while not (rows.exists() and rows.read_bytes().count(b"\n") >= 2):
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = [record["question_id"] for record in read_lines(rows)]
    assert "rows are there already" in run("rollout.evaluate", *words).stderr
    after = Counter(record["question_id"] for record in read_lines(rows))
    assert set(after.values()) == {1}
    assert len(after) == 6
    assert set(before) <= set(after)
    assert json.loads((output / "metrics.json").read_text())["n"] == 6


def test_commands_over_the_runs(world):
    folder, _ = world
    for name in SYSTEMS:
        assert (folder / name / "results.jsonl").is_file(), "the runs are made by the tests before this one"
    runs = [folder / name for name in ("vanilla", "react-text", "dag", "dag-taec", "visor", "visor-taec")]
    compared = run("visor.cli", "compare", *runs, "--json", folder / "all.json").stdout
    assert f"{LIMIT} questions in common" in compared
    costs = next(a for a in json.loads((folder / "all.json").read_text())["analyses"] if a["name"] == "cost")
    assert all(row["model calls"]["value"] >= 1 for row in costs["rows"])
    assert next(r for r in costs["rows"] if r["run"] == "vanilla")["MB"]["value"] > 0
    for name in SYSTEMS:
        assert f"{LIMIT} trajectories replayed, 0 differ" in run("visor.cli", "replay", folder / name).stderr
    run("visor.cli", "report", folder / "visor-taec")
    assert (folder / "visor-taec" / "report.html").stat().st_size > 10_000
    judged = run("visor.cli", "judge", folder / "react-text", "--judge", "rule", check=False)
    assert judged.returncode in (0, 1), judged.stderr  # 1 = the policy gave no answer to judge
    assert "question:" in run("visor.cli", "explain", folder / "dag").stdout
