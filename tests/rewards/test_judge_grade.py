"""The judge that grades from 1 to 5."""

import pytest
from reward_helpers import question, trajectory

from rewards.combine import Judgement
from rewards.combine import score as reward_of
from rewards.judge import ModelJudge, load_judge_prompts
from rewards.judge_cache import JudgeCache
from rewards.judge_replies import parse_grade
from rewards.vrag import vrag_reward
from rollout.build import JudgeOptions, make_judge
from visor.types import Completion


class Replies:
    """A client that plays a list of replies, the last one again and again."""

    name = "grader"

    def __init__(self, *replies):
        self.replies, self.requests = list(replies), []

    async def complete(self, request):
        self.requests.append(request)
        return Completion(text=self.replies[min(len(self.requests), len(self.replies)) - 1])


@pytest.mark.parametrize(
    ("reply", "grade"),
    [
        ("<judge>4</judge>", 4),
        ("right in part.\n<judge> 3 </judge>", 3),
        ("<judge>5/5</judge>", 5),
        ("<judge>2</judge> no, <judge>1</judge>", 1),
        ("<judge>0</judge>", None),
        ("<judge>6</judge>", None),
        ("<judge>45</judge>", None),
        ("<judge>4.5</judge>", None),
        ("<judge>4 or 5</judge>", None),
        ("<judge>3/4</judge>", None),
        ("<judge>-4</judge>", None),
        ("<judge>True</judge>", None),
        ("4", None),
        ("", None),
        (None, None),
    ],
)
def test_a_grade_is_read_from_the_tag_alone(reply, grade):
    assert parse_grade(reply) == grade


@pytest.mark.parametrize("grade", range(1, 6))
def test_four_and_five_are_right(grade):
    verdict = ModelJudge(Replies(f"<judge>{grade}</judge>"), scale=5).verdict("Q?", ["12"], "12")
    assert (verdict.value, verdict.score) == (grade >= 4, float(grade))


def test_a_reply_without_a_grade_is_asked_again_and_then_its_own_state():
    client = Replies("no idea", "<judge>True</judge>", "<judge>4</judge>")
    assert ModelJudge(client, scale=5).verdict("Q?", ["12"], "12").score == 4
    assert len(client.requests) == 3
    verdict = ModelJudge(Replies("<judge>True</judge>"), scale=5).verdict("Q?", ["12"], "12")
    assert (verdict.value, verdict.score) == (None, None)
    assert "no verdict in 3 replies of model:grader+grade" in verdict.error


def test_the_grade_is_kept_and_apart_from_the_binary_verdict(tmp_path):
    path = tmp_path / "judge.jsonl"
    first = ModelJudge(Replies("<judge>3</judge>"), scale=5, cache=JudgeCache(path), identity="m")
    assert first.verdict("Q?", ["12"], "12").score == 3
    client = Replies("<judge>True</judge>")
    again = ModelJudge(client, scale=5, cache=JudgeCache(path), identity="m").verdict("Q?", ["12"], "12")
    assert (again.value, again.score, client.requests) == (False, 3, [])
    binary = ModelJudge(client, cache=JudgeCache(path), identity="m").verdict("Q?", ["12"], "12")
    assert (binary.value, binary.score, len(client.requests)) == (True, None, 1)
    assert first.fingerprint != ModelJudge(client, identity="m").fingerprint


def test_a_line_of_a_cache_without_grades_is_read(tmp_path):
    path = tmp_path / "judge.jsonl"
    client = Replies("<judge>True</judge>")
    ModelJudge(client, cache=JudgeCache(path)).verdict("Q?", ["12"], "12")
    path.write_text(path.read_text().replace(', "score": null', ""))
    assert ModelJudge(client, cache=JudgeCache(path)).verdict("Q?", ["12"], "12").value is True
    assert len(client.requests) == 1


def test_the_grade_goes_into_the_reward_record():
    judge = ModelJudge(Replies("<judge>5</judge>"), scale=5)
    breakdown = reward_of(trajectory("1", answer="12"), question(), judge)
    assert (breakdown.verdict, breakdown.score, breakdown.judge) == (True, 5.0, "model:grader+grade")
    assert breakdown.judge_reply == "<judge>5</judge>"
    assert vrag_reward(trajectory("1", answer="12"), question(), Judgement("j", None)).judge_reply == ""


def test_prompts_of_a_file_replace_those_it_has(tmp_path):
    path = tmp_path / "prompts.yaml"
    path.write_text("grade:\n  system: s\n  user: '{question} {gold} {answer}'\n")
    client = Replies("<judge>4</judge>")
    ModelJudge(client, scale=5, prompts=path).verdict("Q?", ["{gold}"], "{x}")
    assert client.requests[0].messages[1].text == "Q? {gold} {x}"
    assert load_judge_prompts(path)["correctness"] == load_judge_prompts()["correctness"]
    path.write_text("grades: {}\n")
    with pytest.raises(ValueError, match="names correctness, grade, extraction, honesty"):
        load_judge_prompts(path)


def test_the_scale_is_an_option_of_the_judge():
    pytest.importorskip("openai")
    for bad in (3, "five"):
        with pytest.raises(ValueError, match="scale"):
            JudgeOptions(scale=bad)
    with pytest.raises(ValueError, match="scale is 2"):
        ModelJudge(Replies(""), scale=3)
    judge = make_judge("openai:m@http://127.0.0.1:9/v1", options=JudgeOptions(scale=5))
    assert judge.name == "model:m+grade"
