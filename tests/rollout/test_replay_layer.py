"""`visor replay --taec`: the layer beside a recorded run of a scripted policy, which it does not change."""

import json
from collections import Counter
from pathlib import Path

import pytest

from rollout.evaluate import EvaluateConfig, evaluate
from rollout.recorded_run import open_recorded
from rollout.recorder import read_lines, rewrite
from rollout.replay_layer import LayerSummary, layer_text, replay_layer
from visor.cli import main
from visor.types import Completion

THOUGHTS = (
    "find it",
    "{word} is not found on this page",
    "the page clearly shows {word}. more is to be seen",
    "so it is {word}",
)


def searching(messages, turn):
    """Three times the same query, which every page answers, with thoughts that fail and confirm."""
    word = messages[1].text.split()[-2]
    think = THOUGHTS[turn].format(word=word)
    action = f"<answer>{word}</answer>" if turn == 3 else "<search>page</search>"
    return f"<think>{think}</think>{action}"


def graph_searching(messages, turn):
    """Three searches with summaries that fail, confirm and leave open; then the answer."""
    prompt = messages[1].text
    word = prompt.split("Question: ")[1].split()[2]
    searched = prompt.count('"parents"')
    if any(message.role == "assistant" for message in messages):
        summary = ("Not found here.", "It clearly shows 3 of them. More follows.", "Open.")[min(searched, 2)]
        name, arguments = (
            "summarize_and_memorize",
            {"summarize": summary, "memorize": [{"picture": 1, "priority_score": 1 + searched}]},
        )
    elif searched < 3:
        name = "add_search_node"
        query = ("page", word, "banana cherry")[searched]
        arguments = {"id": f"s{searched}", "parent_ids": ["root"], "query": query}
    else:
        name, arguments = "add_answer_node", {"parent_ids": ["s0"], "answer": word}
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<think>so</think><tool_call>{call}</tool_call>"


class Counting:
    """Tells a scripted reply the number of the call: a context with a window does not."""

    name = "scripted"

    def __init__(self, reply):
        self.reply = reply
        self.calls = Counter()

    async def complete(self, request):
        question = request.messages[1].text
        text = self.reply(request.messages, self.calls[question])
        self.calls[question] += 1
        return Completion(text=text, model=self.name)


@pytest.fixture
def record(world, tmp_path):
    """Make a run and return its folder."""

    def make(taec="off", system="visor", **episode):
        settings = {"prompts": "tiny", "max_turns": 6, "window": 1} | episode
        config = EvaluateConfig(
            corpus=str(world.corpus),
            benchmark=world.questions,
            output=str(tmp_path / f"{system}-{taec}-{len(episode)}"),
            system=system,
            episode=settings,
            taec=taec,
        )
        evaluate(config, Counting(searching if system == "visor" else graph_searching))
        return Path(config.output)

    return make


def replays(run, switch, **options):
    return list(replay_layer(open_recorded(run), switch, **options))


def pages(trajectory):
    return [t["observation"]["page_ids"] for t in trajectory["turns"] if t["action"]["kind"] == "search"]


def test_a_layer_over_its_own_run_decides_as_recorded(record):
    for system, switch, episode in (
        ("visor", "AM", {}),
        ("visor", "AMV", {"window": None}),
        ("dag", "AMV", {}),
    ):
        found = replays(record(switch, system, **episode), switch)
        assert len(found) == 4
        for replay in found:
            assert replay.differs == []
            assert replay.operators == switch
            assert not any(turn.other_page or turn.rendered or turn.other_pixels for turn in replay.turns)
            assert sum(turn.admitted is not None for turn in replay.turns) == 3


def test_what_the_layer_would_have_done_on_a_plain_run(record):
    run = record()
    before = (run / "trajectories.jsonl").read_bytes()
    [damson] = replays(run, "AM", question_id="q4")
    assert damson.differs == []
    assert damson.slots == ["colour", "damson"]
    searches = [turn for turn in damson.turns if turn.admitted]
    page = "fruit.pdf#page={}".format
    assert [turn.admitted["recorded"] for turn in searches] == [[page(n)] for n in (1, 2, 3)]
    assert [turn.admitted["layer"] for turn in searches][:2] == [[page(1)], [page(4)]]
    assert searches[1].admitted["details"]["gain"]["coverage"] == 0.5
    # Turn 3 shows what was written about page 1, two turns ago, as a trace.
    [change] = next(turn.rendered for turn in damson.turns if turn.rendered)
    assert change["of"] == page(1)
    assert change["recorded"] == ["damson is not found on this page"]
    assert change["layer"] == ['search "page": nothing usable here']
    assert (run / "trajectories.jsonl").read_bytes() == before


def test_the_first_other_page_is_the_one_a_run_under_the_layer_shows(record):
    """Up to there both runs are the same, so the layer beside the one is the layer over the other."""
    plain, under = record(), record("A")
    over = {t["question_id"]: pages(t) for t in read_lines(under / "trajectories.jsonl")}
    differing = 0
    for replay in replays(plain, "A"):
        searches = [turn.admitted for turn in replay.turns if turn.admitted]
        for index, admitted in enumerate(searches):
            assert admitted["layer"] == over[replay.question_id][index]
            if admitted["layer"] != admitted["recorded"]:
                differing += 1
                break
    assert differing


def test_pixels_of_earlier_pictures(record):
    run = record(window=None)
    half = open_recorded(run).config.taec_config.model_copy(deep=True)
    half.allocation.budget_pixels = 100_000
    [replay] = replays(run, "V", layer=half, question_id="q1")
    last = replay.turns[-1]
    assert [picture["recorded"] for picture in last.pictures] == [512 * 784] * 2
    assert sum(picture["layer"] for picture in last.pictures) <= last.budget["pixels"] < 512 * 784
    assert replay.turns[1].budget is None, "nothing is allocated before the second search"


def test_the_layer_over_a_plain_graph(record):
    run = record(system="dag")
    found = replays(run, "on")
    assert all(replay.differs == [] for replay in found)
    assert {replay.operators for replay in found} == {"AMV"}
    turns = found[0].turns
    assert any(hint["kind"] == "dead_end" for turn in turns for hint in turn.hints)
    assert any(
        change["of"] == "s0" and "trace" in change["layer"] for turn in turns for change in turn.rendered
    )
    assert any(turn.budget for turn in turns)


def test_the_command(record, capsys, tmp_path):
    run = record()
    assert main(["replay", str(run), "--taec", "on", "--limit", "2"]) == 0
    out, err = capsys.readouterr()
    assert out.count("── turn 1  search: page") == 2
    assert "A  fruit.pdf#page=1 of a pool of 4, as recorded" in out
    assert "M  fruit.pdf#page=1 shown as: search" in out
    assert "2 trajectories" in err
    command = ["replay", str(run), "--taec", "A", "--json", "--recorded-retrieval"]
    assert main([*command, "--set", "taec_config.admission.alpha=0"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(records) == 4
    assert records[3]["turns"][1]["admitted"]["details"]["gain"]["coverage"] == 0
    for arguments, message in (
        (["--taec", "off"], "no operator of the layer is on"),
        (["--taec", "X"], "expected on, off, or operator letters"),
        (["--taec", "on", "--question", "nobody"], "no trajectory of question 'nobody'"),
        (["--taec", "on", "--set", "episode.window=1"], "only the layer's settings can change"),
        (["--taec", "on", "--set", "taec_config.admission.alfa=1"], "alpha"),
        (["--limit", "1"], "go with --taec"),
    ):
        assert main(["replay", str(run), *arguments]) == 2
        assert message in capsys.readouterr().err


def test_slots_of_a_model_are_taken_from_the_record(record):
    """A run whose layer asked a model replays with the slots it got, and the layer beside it has the same."""
    run = record("A")
    records = list(read_lines(run / "trajectories.jsonl"))
    for one in records:
        one["meta"]["evidence_policy"]["slots"] |= {"extractor": "model", "model_calls": 1}
    rewrite(run / "trajectories.jsonl", records)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["arguments"]["taec_config"]["slot_extractor"] = "model"
    (run / "manifest.json").write_text(json.dumps(manifest))
    found = replays(run, "A")
    assert {one.slots_from for one in found} == {"model"}
    assert found[0].slots == ["colour", "apple"]
    assert main(["replay", str(run)]) == 0


def test_the_summary_and_the_note_of_a_record_that_no_longer_holds(record):
    run = record()
    records = list(read_lines(run / "trajectories.jsonl"))
    records[0]["turns"][0]["observation"]["page_ids"] = ["fruit.pdf#page=3"]
    rewrite(run / "trajectories.jsonl", records)
    summary = LayerSummary()
    found = replays(run, "A")
    for one in found:
        summary.add(one)
    assert "no longer gives the recorded turn 1: observation" in layer_text(found[0])
    assert "1 trajectories are no longer what the environment gives" in summary.text()
