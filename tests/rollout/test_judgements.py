"""`visor judge`: a finished run judged again, resumed, and the agreement of the two judges."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.judge import ModelJudge
from rollout.agreement import Agreement, agreement
from rollout.evaluate import EvaluateConfig, evaluate
from rollout.judgements import judge_run, judgement_path
from rollout.recorder import read_lines
from visor.cli import main
from visor.types import Completion


class Grader:
    """Says True of the answers it is given, False of others; raises for those in `down`."""

    name = "grader"

    def __init__(self, *right, down=()):
        self.right, self.down, self.asked = right, down, []

    async def complete(self, request):
        lines = request.messages[1].text.splitlines()
        answer = lines[lines.index("[candidate's answer]") + 1]
        self.asked.append(answer)
        if answer in self.down:
            raise ConnectionError("gone")
        return Completion(text=f"<judge>{answer in self.right}</judge>")


@pytest.fixture
def run(world, client, tmp_path):
    config = EvaluateConfig(
        corpus=str(world.corpus),
        benchmark=world.questions,
        output=str(tmp_path / "run"),
        episode={"prompts": "tiny", "max_turns": 5},
    )
    evaluate(config, client)
    return tmp_path / "run"


def test_a_run_is_judged_again_and_left_as_it_is(run):
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    client = Grader("apple", "banana", "damson")
    judgements = judge_run(run, ModelJudge(client))
    assert {entry.question_id: entry.verdict for entry in judgements} == {
        "q1": True, "q2": True, "q3": False, "q4": True,
    }  # fmt: skip
    stored = list(read_lines(judgement_path(run, "model:grader")))
    assert sorted(record["question_id"] for record in stored) == ["q1", "q2", "q3", "q4"]
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
    assert len(judge_run(run, ModelJudge(client))) == 4
    assert len(client.asked) == 4  # nothing is asked twice


def test_a_torn_line_a_failure_and_a_changed_answer_are_asked_again(run):
    client = Grader("apple", down=("banana",))
    first = judge_run(run, ModelJudge(client))
    (failed,) = [entry for entry in first if entry.verdict is None]
    assert (failed.question_id, failed.error) == ("q2", "ConnectionError: gone")
    path = judgement_path(run, "model:grader")
    lines = path.read_bytes().splitlines(keepends=True)
    torn = json.loads(lines[-1])["question_id"]
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:40])
    results = run / "results.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    changed = next(row for row in rows if row["question_id"] not in ("q2", torn))
    changed["answer"] = "melon"
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    client.asked.clear()
    client.down = ()
    second = judge_run(run, ModelJudge(client))
    again = {row["answer"] for row in rows if row["question_id"] in ("q2", torn, changed["question_id"])}
    assert set(client.asked) == again
    assert sorted(entry.question_id for entry in second) == ["q1", "q2", "q3", "q4"]
    assert all(entry.verdict is not None for entry in second)
    assert len(path.read_text().splitlines()) == 4


def test_another_judge_has_its_own_file(run):
    judge_run(run, ModelJudge(Grader()))
    judge_run(run, ModelJudge(Grader(), honesty="model"))
    assert len(list((run / "judgements").iterdir())) == 2


def test_the_command_prints_the_agreement(run, capsys):
    assert main(["judge", str(run), "--judge", "slidevqa"]) == 0
    shown = capsys.readouterr()
    table = dict(line.rsplit(maxsplit=1) for line in shown.out.splitlines()[2:11])
    assert table == {
        "answers that both judged": "4",
        "both right": "3",
        "both wrong": "1",
        "right for rule only": "0",
        "right for slidevqa only": "0",
        "disagree": "0",
        "agreement": "1.000",
        "Cohen's kappa": "1.000",
        "without a verdict of one": "0",
    }
    assert "4/4 answers judged" in shown.err
    assert main(["judge", str(run), "--judge", "slide"]) == 2
    assert main(["judge", str(run / "nothing"), "--judge", "rule"]) == 2
    assert "holds no results.jsonl" in capsys.readouterr().err


def test_a_judge_that_gives_no_verdict_is_an_exit_code(run, capsys):
    pytest.importorskip("openai")
    arguments = ["--judge", "openai:m@http://127.0.0.1:9/v1", "--set", "max_retries=0", "--set", "scale=5"]
    assert main(["judge", str(run), *arguments]) == 1
    shown = capsys.readouterr()
    assert "4 of 4 answers got no verdict" in shown.err
    assert "model:m+grade" in shown.out


def test_rows_without_formats_are_refused_by_the_judge_that_needs_them(run, capsys):
    results = run / "results.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    for row in rows:
        row["tags"]["benchmark"] = "mmlongbench"
        del row["answer_format"], row["judge"], row["score"]  # as rows of an older version
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["judge", str(run), "--judge", "mmlongbench"]) == 2
    assert "do not hold the answer formats" in capsys.readouterr().err
    assert main(["judge", str(run), "--judge", "slidevqa"]) == 0
    assert "right for rule only" in capsys.readouterr().out  # the judge's name is then the manifest's


def test_kappa_by_hand():
    found = Agreement("a", "b", both_right=20, both_wrong=15, only_first=5, only_second=10)
    assert (found.n, found.share) == (50, 0.7)
    assert found.kappa == pytest.approx((0.7 - (0.5 * 0.6 + 0.5 * 0.4)) / 0.5)
    assert Agreement("a", "b", 9, 0, 0, 0).kappa is None
    assert Agreement("a", "b", 0, 0, 0, 0).share is None


verdicts = st.dictionaries(st.tuples(st.integers(0, 9)), st.sampled_from([True, False, None]))


@given(verdicts, verdicts)
def test_agreement_by_a_slow_count(first, second):
    found = agreement("a", "b", first, second)
    pairs = [(first.get(key), second.get(key)) for key in {**first, **second}]
    judged = [pair for pair in pairs if None not in pair]
    assert (found.n, found.left_out) == (len(judged), len(pairs) - len(judged))
    if judged:
        assert math.isclose(found.share, sum(a is b for a, b in judged) / len(judged))
    assert found.kappa is None or -1 <= found.kappa <= 1
