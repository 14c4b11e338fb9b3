"""Runs of all systems over one corpus, through the command: every part they play is found by itself."""

import json

from test_systems_harness import REPLIES

from rollout.evaluate import EvaluateConfig, evaluate
from visor.cli import main
from visor.types import Completion


def test_compare_of_every_system(world, tmp_path, client, capsys):
    """ReAct first: baseline and reference. TAEC's slots come from a model, one call a question."""

    def reply_of(system):
        def reply(request):
            if len(request.messages) == 1:
                return '["colour", "fruit"]'
            return REPLIES[system](request)

        return reply

    for name, system, settings in (
        ("react", "react", {}),
        ("vanilla", "vanilla", {}),
        ("dag", "dag", {}),
        ("taec", "dag", {"taec": "on", "taec_config": {"slot_extractor": "model"}}),
    ):
        client.reply = reply_of(system)
        client.complete = _without_first_text(client)
        config = EvaluateConfig(
            corpus=str(world.corpus),
            benchmark=world.questions,
            output=str(tmp_path / name),
            system=system,
            **settings,
        )
        evaluate(config, client)
    runs = [str(tmp_path / name) for name in ("react", "vanilla", "dag", "taec")]
    assert main(["replay", runs[3]]) == 0, "with the slots of the record"
    capsys.readouterr()
    assert main(["compare", *runs, "--format", "json", "--resamples", "50"]) == 0
    record = json.loads(capsys.readouterr().out)
    analyses = {one["name"]: one["rows"] for one in record["analyses"]}
    assert [row["operators"] for row in analyses["ablation"]] == ["substrate", "A+M+V"]
    [control] = analyses["retrievers"]
    assert control["run"] == "taec"
    assert control["vanilla"]["value"] == control["plain"]["value"] == 0.75
    assert [row["model calls"]["value"] for row in analyses["cost"]] == [3, 1, 5, 6]
    searches = [row["searches"]["value"] for row in analyses["abilities"]]
    assert searches == [1, 1, 2, 2], "ReAct's second query was a repeated one: a notice, no retrieval"
    assert [(row["reference"], row["n"]) for row in analyses["stopping"]] == [("stopped after one", 4)]
    assert {row["searches"] for row in analyses["price"]} == {"2"}
    assert set(record["lacking"]) == {"matched", "unanswerable", "samples", "judges", "pressure"}
    assert record["lacking"]["matched"] == "react never searched more than once"


def _without_first_text(client):
    """The scripted client of these tests keeps the second message's text, which a slot prompt has not."""

    async def complete(request):
        return Completion(text=client.reply(request), model=client.name)

    return complete
