import asyncio
import json

import pytest
from reward_helpers import case_file, load_json

from rewards.judge import ModelJudge, RuleJudge
from rewards.judge_replies import parse_verdict
from visor.types import Completion


class Client:
    """Answers with the given replies in turn; an exception among them is raised."""

    name = "judge-model"

    def __init__(self, *replies):
        self.replies = list(replies)
        self.requests = []

    async def complete(self, request):
        self.requests.append(request)
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return Completion(text=reply)


def test_every_judge_reply_case():
    lines = case_file("judge_replies.jsonl").read_text(encoding="utf-8").splitlines()
    cases = [json.loads(line) for line in lines]
    assert len(cases) == 13
    for case in cases:
        found = parse_verdict(case["reply"])
        if case["right"] == "unparseable":
            assert found is None, case["id"]
        elif isinstance(case["right"], bool):
            assert found is case["right"], case["id"]
        else:
            assert found is not True, case["id"]


@pytest.mark.parametrize(
    "reply",
    [
        "<judge>True or False</judge>",
        "<judge>true/false</judge>",
        "<judge>True",
        "<judge>truely</judge>",
        "<judge>not true</judge>",
        "<judge>True</judge> <judge>?</judge>",
        "True",
    ],
)
def test_replies_without_a_verdict(reply):
    assert parse_verdict(reply) is None


def test_case_template_texts_reach_the_judge_word_for_word():
    case = load_json("judge_template.json")
    client = Client("<judge>False</judge>")
    verdict = ModelJudge(client).verdict(case["question"], [case["gold"]], case["answer"])
    assert verdict.value is False
    sent = "\n".join(message.text for message in client.requests[0].messages)
    assert case["question"] in sent
    assert case["answer"] in sent
    assert sent.count(case["gold"]) == 1
    assert client.requests[0].sampling.temperature == 0


@pytest.mark.parametrize("answer", ["", "  "])
@pytest.mark.parametrize("gold", ["12", "Not answerable"])
def test_an_empty_answer_is_wrong_without_a_call(answer, gold):
    client = Client()
    assert ModelJudge(client).verdict("Q?", [gold], answer).value is False
    assert RuleJudge().verdict("Q?", [gold], answer).value is False
    assert client.requests == []


def test_a_reply_without_a_verdict_is_asked_again_a_bounded_number_of_times():
    client = Client("maybe", "<judge>True</judge>")
    assert ModelJudge(client).verdict("Q?", ["12"], "12").value is True
    assert len({request.seed for request in client.requests}) == 2

    client = Client("maybe", "hm", "no idea", "<judge>True</judge>")
    verdict = ModelJudge(client, attempts=3).verdict("Q?", ["12"], "12")
    assert (verdict.value, verdict.raw) == (None, "no idea")
    assert "3 replies" in verdict.error
    assert len(client.requests) == 3


def test_a_fault_of_the_client_is_no_verdict():
    client = Client(PermissionError("401"))
    verdict = ModelJudge(client).verdict("Q?", ["12"], "12")
    assert (verdict.value, verdict.error) == (None, "PermissionError: 401")
    assert len(client.requests) == 1


def test_honesty_by_rule_or_by_model():
    client = Client("<judge>False</judge>")
    assert ModelJudge(client).honest("Q?", "not found").value is True
    assert client.requests == []
    assert asyncio.run(ModelJudge(client, honesty="model").ahonest("Q?", "not found")).value is False
    assert "not found" in client.requests[0].messages[1].text


def test_settings_are_checked():
    with pytest.raises(ValueError, match="attempt"):
        ModelJudge(Client(), attempts=0)
    with pytest.raises(ValueError, match="honesty"):
        ModelJudge(Client(), honesty="maybe")


def test_names():
    assert RuleJudge().name == "rule"
    assert ModelJudge(Client()).name == "model:judge-model"
