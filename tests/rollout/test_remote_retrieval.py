"""Case F6: a retrieval server that dies in the middle of a rollout, and comes back, or does not."""

import json
import threading
import time

import pytest

from data.corpus import Corpus
from data.questions import load_questions
from rewards.judge import RuleJudge
from rollout.build import AgentConfig
from rollout.engine import EpisodeJob, RolloutEngine
from rollout.evaluate import EvaluateConfig, evaluate, main
from rollout.manifest import read_manifest
from rollout.recorder import read_lines
from visor.env.config import EpisodeConfig
from visor.env.prompts import load_prompts
from visor.models.base import Sampling
from visor.retrieval.client import RetrievalClient
from visor.retrieval.service.process import ServiceProcess
from visor.systems.visor import VisorSystem
from visor.types import Question


@pytest.fixture(scope="module")
def service(world):
    with ServiceProcess(world.corpus) as process:
        yield process


def run_config(world, tmp_path, index, name="run"):
    return EvaluateConfig(
        corpus=str(world.corpus),
        index=index,
        benchmark=world.questions,
        output=str(tmp_path / name),
        episode={"prompts": "tiny", "max_turns": 5},
    )


def trajectories(folder):
    """Records by question, without what differs between two runs of the same."""
    records = {}
    for record in read_lines(folder / "trajectories.jsonl"):
        record["meta"].pop("wall_seconds")
        for turn in record["turns"]:
            turn["retrieval_seconds"] = 0
        records[record["question_id"]] = record
    return records


def test_an_evaluation_over_http_is_the_one_in_process(world, client, service, tmp_path):
    local = evaluate(run_config(world, tmp_path, None, "local"), client)
    remote = evaluate(run_config(world, tmp_path, service.url, "remote"), client)
    assert remote["accuracy"] == local["accuracy"] == 0.75
    assert trajectories(tmp_path / "remote") == trajectories(tmp_path / "local")
    manifests = [read_manifest(tmp_path / name).index for name in ("local", "remote")]
    assert manifests[1].pop("path") == service.url
    manifests[0].pop("path")
    assert manifests[0] == manifests[1], "the runs may be compared, and one may go on as the other"


def test_a_service_that_is_not_there_is_one_line(world, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("visor.retrieval.client.CONNECT_BUDGET", 0.3)
    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps({"question": "x", "replies": ["y"]}) + "\n")
    arguments = ["--model", f"script:{script}", "--corpus", str(world.corpus), "--benchmark", world.questions]
    arguments += ["--output", str(tmp_path / "run"), "--index", "http://127.0.0.1:9"]
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the search service http://127.0.0.1:9 did not answer" in line


def test_an_address_stays_an_address_in_the_config(world):
    config = AgentConfig(corpus=str(world.corpus), index="http://localhost:8765")
    assert config.index_path == "http://localhost:8765"
    assert AgentConfig(corpus="c").index_path.parts == ("c", "index", "bm25")


@pytest.mark.parametrize("seconds", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_case_f6_a_server_that_comes_back_costs_nothing(world, client, tmp_path, seconds):
    """SIGKILL at the third search, the same port again after some seconds: every question is answered."""
    with ServiceProcess(world.corpus) as first:
        again = []

        def come_back():
            time.sleep(seconds)
            again.append(ServiceProcess(world.corpus, port=first.port))

        thread = threading.Thread(target=come_back)
        words, asked = client.reply, []

        def reply(request):
            text = words(request)
            asked.append(text)
            if sum("<search>" in said for said in asked) == 3 and not thread.ident:
                first.kill()
                thread.start()
            return text

        client.reply = reply
        try:
            metrics = evaluate(run_config(world, tmp_path, first.url), client)
            assert thread.ident, "it was killed"
        finally:
            thread.join(60)
            for process in again:
                process.kill()
    assert (metrics["accuracy"], metrics["faults"], metrics["failed"]) == (0.75, 0, 0)
    assert (
        max(t["turns"][0]["retrieval_seconds"] for t in read_lines(tmp_path / "run/trajectories.jsonl")) > 0
    )
    assert all(record["error"] is None for record in trajectories(tmp_path / "run").values())


def test_case_f6_a_spent_budget_fails_those_trajectories_only(world, client, service):
    """Two questions are answered, then the server dies for good: the others are faults of the environment,
    unscored, which is not a reward of 0."""
    corpus = Corpus.open(world.corpus)
    own = ServiceProcess(world.corpus)
    with own, RetrievalClient(own.url, pages=corpus.pages(), budget=1.0) as retriever:
        config = EpisodeConfig(prompts="tiny", max_turns=5)
        system = VisorSystem(client, retriever, corpus, config, load_prompts("tiny"), Sampling())
        engine = RolloutEngine(system, RuleJudge())
        questions = load_questions(world.questions, corpus, [])
        before = engine.run([EpisodeJob(question) for question in questions[:2]])
        own.kill()
        after = engine.run([EpisodeJob(question) for question in questions[2:]])
    assert [t.answer for t in before] == ["apple", "banana"]
    assert all(t.error is None and t.reward.total is not None for t in before)
    for trajectory in after:
        assert (trajectory.error.source, trajectory.error.type) == ("environment", "RetrievalError")
        assert "did not answer within 1 s" in trajectory.error.message
        assert trajectory.reward.total is None
        assert trajectory.reward.unscored_reason


def test_many_episodes_at_once_each_get_their_own_pages(world, client, service):
    corpus = Corpus.open(world.corpus)
    with RetrievalClient(service.url, pages=corpus.pages()) as retriever:
        config = EpisodeConfig(prompts="tiny", max_turns=5)
        system = VisorSystem(client, retriever, corpus, config, load_prompts("tiny"), Sampling())
        words = ["apple", "banana", "cherry", "damson"] * 16
        jobs = [
            EpisodeJob(Question(question_id=f"q{n}", text=f"colour of {word} ?"))
            for n, word in enumerate(words)
        ]
        found = RolloutEngine(system, RuleJudge()).run(jobs)
    for word, trajectory in zip(words, found):
        assert trajectory.answer == word
        number = ["apple", "banana", "cherry", "damson"].index(word) + 1
        assert trajectory.shown_page_ids == [f"fruit.pdf#page={number}"]
