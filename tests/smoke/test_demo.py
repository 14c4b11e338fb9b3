"""The demo as a user runs it: killed with -9 in the middle, started again, and its summary checked."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from scripts.demo import DEMO, EVALUATED, stages
from scripts.demo_summary import CURVE_KEYS, KEYS

ROOT = Path(__file__).parents[2]
KILLED_IN = "sft"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def mark(stage: str) -> dict:
    path = ROOT / DEMO / "stages" / f"{stage}.json"
    return json.loads(path.read_text()) if path.exists() else {"done": False}


def start(log) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "scripts.demo"],
        cwd=ROOT,
        stdout=log,
        stderr=subprocess.STDOUT,
    )


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Output of a whole run, after one that was killed while it trained."""
    path = tmp_path_factory.mktemp("demo") / "log"
    if not mark(KILLED_IN)["done"]:
        with path.open("wb") as file:
            killed = start(file)
        while not mark(KILLED_IN).get("processes") and killed.poll() is None:
            time.sleep(0.2)
        time.sleep(5)
        os.kill(killed.pid, signal.SIGKILL)  # the demo alone: what it started goes on, and must be ended
        killed.wait()
        left = [psutil.Process(pid) for pid, _ in mark(KILLED_IN)["processes"]]
        assert left
        assert not mark(KILLED_IN)["done"]
    else:
        left = []
    with path.open("wb") as file:
        run = start(file)
    code = run.wait()
    output = path.read_text()
    assert code == 0, output[-3000:]
    assert not any(process.is_running() for process in left)
    return output


@pytest.fixture(scope="module")
def summary(log):
    return json.loads((ROOT / DEMO / "summary.json").read_text())


def test_finished_stages_are_not_run_again(log):
    for stage in stages():
        assert mark(stage.name)["done"]
        if stage.name == KILLED_IN:
            break
        assert f"[{stage.name}] done before" in log
        assert f"[{stage.name}] $" not in log


def test_summary_has_every_figure(summary):
    assert summary["schema_version"] == 1
    assert set(summary["seconds"]) >= {"corpus", "sft", "grpo", "evaluate", "total"}
    assert list(summary["evaluation"]) == list(EVALUATED)
    for entry in summary["evaluation"].values():
        for figures in (entry, entry["greedy"], entry["multi_hop"]):
            for key in KEYS:
                assert isinstance(figures[key], int | float), key
            for key in KEYS[1:7]:
                assert 0 <= figures[key] <= 1, key
        assert entry["n"] == entry["greedy"]["n"] >= 200
        assert entry["multi_hop"]["n"] >= 200
        assert entry["mean_context_images"] <= 2
    assert [point["step"] for point in summary["grpo_curve"]] == list(
        range(1, len(summary["grpo_curve"]) + 1)
    )
    assert all(set(CURVE_KEYS) <= set(point) for point in summary["grpo_curve"])


def test_each_stage_teaches_what_it_is_for(summary):
    """Far below the measured figures (README), so that only a broken stage fails."""
    base, sft, grpo = (summary["evaluation"][row] for row in ("base", "sft", "grpo"))
    assert base["accuracy"] < 0.1
    assert sft["accuracy"] > 0.6
    assert sft["invalid_action_rate"] < 0.1
    assert grpo["verification_share"] > sft["verification_share"] + 0.1
    assert grpo["mean_reward"] > sft["mean_reward"]


def test_the_same_questions_are_asked_of_every_policy(summary):
    asked = []
    for row in EVALUATED:
        for decoding in ("sampled", "greedy"):
            results = ROOT / DEMO / "evaluate" / f"{row}-{decoding}" / "results.jsonl"
            asked.append(sorted(json.loads(line)["question_id"] for line in results.read_text().splitlines()))
    assert all(ids == asked[0] for ids in asked)
    assert len(asked[0]) == len(set(asked[0])) == 640


def test_pictures_and_pages_are_written(summary):
    assert (ROOT / DEMO / "curves.png").read_bytes().startswith(b"\x89PNG")
    page = (ROOT / DEMO / "report.html").read_text()
    assert page.count("data:image/jpeg;base64,") >= 6
