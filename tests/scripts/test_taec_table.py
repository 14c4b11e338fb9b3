"""The TAEC table: rows of runs, paired differences over policies, and where the layer acts."""

from __future__ import annotations

import pytest

from data.corpus import Corpus, ingest
from rollout.evaluate import EvaluateConfig, evaluate
from scripts.taec_table import PLAIN, ROWS, Acts, acts_of, make_tables
from visor.retrieval.index import build_index, default_index_path
from visor.types import Completion, Question

PAGES = ["blue tower plan", "blue tower plan", "height of the blue bridge", "green gate"]


class Client:
    """Searches the same words twice, then answers with the last page that the context shows."""

    name = "scripted"

    async def complete(self, request):
        images = [image for message in request.messages for image in message.images]
        if len(images) < 2:
            text = f"<think>no luck so far {len(images)}</think><search>blue plan</search>"
        else:
            text = f"<think>it is there</think><answer>{images[-1].page_id[-1]}</answer>"
        return Completion(
            text=text, model=self.name, prompt_tokens=100 * (1 + len(images)), completion_tokens=5
        )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Runs of the rows plain and A of two policies; A chooses another second page for their question."""
    from reportlab.pdfgen.canvas import Canvas

    root = tmp_path_factory.mktemp("table")
    canvas = Canvas(str(root / "x.pdf"), pagesize=(300, 200))
    for text in PAGES:
        canvas.drawString(20, 150, text)
        canvas.showPage()
    canvas.save()
    assert ingest([root / "x.pdf"], root / "corpus", workers=1, ocr="off").ok
    build_index(Corpus.open(root / "corpus"), default_index_path(root / "corpus"))
    question = Question(
        question_id="q",
        text="height of the blue bridge ?",
        gold_answers=["3"],
        gold_page_ids=["x.pdf#page=3"],
    )
    (root / "questions.jsonl").write_text(question.model_dump_json() + "\n")
    made = {}
    for row in (PLAIN, "A"):
        made[row] = [root / name / row for name in ("one", "two")]
        for folder in made[row]:
            config = EvaluateConfig(
                corpus=str(root / "corpus"),
                benchmark=f"questions:{root / 'questions.jsonl'}",
                output=str(folder),
                taec=ROWS[row].split()[1],
                episode={"prompts": "tiny"},
            )
            evaluate(config, Client())
    return made


def test_the_tables_pair_the_rows_and_count_each_policy_as_a_sample(folders):
    tables, tests = make_tables(folders, resamples=50)
    quality, context, acts = ({row["row"]: row for row in table.record()["rows"]} for table in tables)
    assert [quality[row]["accuracy"]["value"] for row in folders] == [0.0, 1.0]
    assert quality["A"]["difference"]["value"] == 1.0
    assert quality["A"]["Δ complete"]["value"] == 1.0
    assert quality[PLAIN]["difference"] is None
    assert quality["A"]["questions"] == 1
    assert context["A"]["searches"]["value"] == 2.0
    assert context["A"]["context tokens"]["value"] == 100 + 200 + 300
    assert context["A"]["Δ context"]["value"] == 0.0
    assert (acts["A"]["searches"], acts["A"]["overruled"], acts["A"]["gold won"]) == (4, 2, 2)
    assert (acts[PLAIN]["overruled"], acts["A"]["gold lost"]) == (0, 0)
    assert "A − plain" in tests


def test_acts_of_a_folder(folders):
    from rollout.compare import load_results

    acts = Acts()
    acts_of(folders["A"][0], load_results(folders["A"][0]), acts)
    assert (acts.trajectories, acts.searches, acts.overruled, acts.gold_won) == (1, 2, 1, 1)


def test_every_row_is_a_configuration_that_evaluation_takes(tmp_path):
    import shlex

    from visor.config import load_config

    for options in ROWS.values():
        needed = ["--corpus=c", "--benchmark=b", "--output=o", *shlex.split(options)]
        assert load_config(EvaluateConfig, None, needed)
