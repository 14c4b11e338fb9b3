"""Neutral text and frozen retrieval through the evaluation, with a scripted policy."""

import asyncio
from pathlib import Path

import pytest

from rollout.evaluate import EvaluateConfig, evaluate, main
from rollout.frozen import FrozenRetriever
from rollout.manifest import MixedRunError, read_manifest
from rollout.pressure import PressuredClient, neutral_text
from rollout.recorder import read_lines, rewrite
from rollout.replay import replay_run
from visor.env.tokens import estimate_tokens
from visor.models.base import Request
from visor.types import Completion, text_message


class Watcher:
    """Plays `search_then_answer` and keeps the bytes of each prompt; searches for `query` where one is
    set."""

    name = "scripted"

    def __init__(self, reply, query=None):
        self.reply = reply
        self.query = query
        self.prompts = []

    async def complete(self, request):
        self.prompts.append(request.messages)
        text = self.reply(request)
        if self.query and "<search>" in text:
            text = f"<think>find it</think><search>{self.query}</search>"
        return Completion(text=text, model=self.name)


@pytest.fixture
def config(world, tmp_path):
    return EvaluateConfig(
        corpus=str(world.corpus),
        benchmark=world.questions,
        output=str(tmp_path / "plain"),
        episode={"prompts": "tiny", "max_turns": 5},
    )


def rows_of(config, name):
    return list(read_lines(Path(config.output, name)))


def contexts(config):
    return [[turn["context"] for turn in t["turns"]] for t in rows_of(config, "trajectories.jsonl")]


@pytest.mark.parametrize("tokens", [1, 7, 1000, 32_000])
def test_the_neutral_text_has_the_tokens_asked_for(tokens):
    text = neutral_text(tokens)
    assert estimate_tokens(text) == tokens
    assert not any(character.isdigit() for character in text)


def test_neutral_text_stands_before_the_first_user_message_of_every_prompt(config, client):
    plain = Watcher(client.reply)
    evaluate(config, plain)
    pressed = Watcher(client.reply)
    with_text = config.model_copy(update={"output": config.output + "-16k", "pressure_tokens": 2000})
    evaluate(with_text, pressed)
    added = neutral_text(2000) + "\n\n"
    assert len(pressed.prompts) == len(plain.prompts)
    for before, after in zip(plain.prompts, pressed.prompts, strict=True):
        assert after[1].text == added + before[1].text
        assert [m.text for m in after[2:]] == [m.text for m in before[2:]]
        assert [m.images for m in after] == [m.images for m in before]
    assert contexts(with_text) == contexts(config), "the record is that of the run without the text"
    assert replay_run(with_text.output) == (4, [])
    manifest = read_manifest(with_text.output)
    assert manifest.intervention["pressure_tokens"] == 2000
    record = rows_of(with_text, "trajectories.jsonl")[0]
    assert record["meta"]["intervention"] == manifest.intervention
    tokens = [rows_of(c, "results.jsonl")[0]["estimated_tokens"]["prompt_text"] for c in (config, with_text)]
    assert tokens[1] - tokens[0] == 2000 * 3, "three calls a question"
    with pytest.raises(MixedRunError, match="pressure_tokens: 2000 before, None now"):
        evaluate(with_text.model_copy(update={"pressure_tokens": 0}), plain)


def test_frozen_retrieval_shows_the_recorded_pages_whatever_the_query(config, client):
    evaluate(config, Watcher(client.reply))
    recorded = config.output
    other = config.model_copy(update={"output": recorded + "-frozen", "frozen_retrieval": recorded})
    metrics = evaluate(other, Watcher(client.reply, query="nothing of that kind"))
    assert metrics["completeness"] == 1.0
    shown = [[row["shown_page_ids"] for row in rows_of(c, "results.jsonl")] for c in (config, other)]
    assert shown[0] == shown[1]
    assert {row["queries"][0] for row in rows_of(other, "results.jsonl")} == {"nothing of that kind"}
    before, now = read_manifest(recorded), read_manifest(other.output)
    assert now.index == before.index
    assert now.intervention["frozen"]["searches"] == FrozenRetriever(recorded).digest
    assert replay_run(other.output) == (4, [])
    live = config.model_copy(update={"output": recorded + "-live"})
    assert evaluate(live, Watcher(client.reply, query="nothing of that kind"))["completeness"] == 0.0


def test_many_questions_at_once_keep_their_own_searches(config, client):
    evaluate(config, Watcher(client.reply))
    other = config.model_copy(
        update={"output": config.output + "-frozen", "frozen_retrieval": config.output, "samples": 3}
    )
    evaluate(other, Watcher(client.reply, query="x"))
    wanted = {row["question_id"]: row["shown_page_ids"] for row in rows_of(config, "results.jsonl")}
    found = rows_of(other, "results.jsonl")
    assert len(found) == 12
    assert all(row["shown_page_ids"] == wanted[row["question_id"]] for row in found)


def test_searches_beyond_the_record_find_nothing(config, client):
    evaluate(config, Watcher(client.reply))
    retriever = FrozenRetriever(config.output)
    retriever.start("q1", 0)
    assert retriever.search("anything", 3)
    assert retriever.search("anything", 3) == []
    retriever.start("q1", 7)
    assert len(retriever.search("anything", 1)) == 1, "a sample that was not recorded takes the first's"


def test_a_frozen_run_needs_no_index_and_every_question(config, client, world, tmp_path, capsys):
    evaluate(config, Watcher(client.reply))
    path = Path(config.output, "trajectories.jsonl")
    command = ["--corpus", str(world.corpus), "--benchmark", world.questions, "--frozen_retrieval"]
    command += [config.output, "--index", str(tmp_path / "no index"), "--output", str(tmp_path / "new")]
    replies = tmp_path / "replies.jsonl"
    replies.write_text('{"reply": "<think>so</think><answer>apple</answer>"}\n' * 4)
    assert main([*command, "--model", f"script:{replies}"]) == 0
    rewrite(path, list(read_lines(path))[1:])
    assert main([*command[:-1], str(tmp_path / "third"), "--model", f"script:{replies}"]) == 2
    assert "has no trajectory of 1 of the 4 questions" in capsys.readouterr().err


def test_only_the_first_user_message_grows():
    seen = []

    class Echo:
        name = "echo"

        async def complete(self, request):
            seen.append(request.messages)
            return Completion(text="")

    messages = [text_message("system", "s"), text_message("user", "q"), text_message("user", "r")]
    asyncio.run(PressuredClient(Echo(), 5).complete(Request(messages=messages, seed=1)))
    assert [m.text for m in seen[0]] == ["s", neutral_text(5) + "\n\nq", "r"]
    assert messages[1].text == "q"
