import pytest

from rollout.ask import ask
from rollout.build import AgentConfig
from rollout.trace import ending_text, printable
from visor.types import ErrorRecord, StopReason, Trajectory


def test_ask_shows_each_turn_then_the_answer_with_its_pages(world, client):
    config = AgentConfig(corpus=str(world.corpus), episode={"prompts": "tiny"})
    shown = []
    trajectory = ask(config, " colour of banana ? ", client=client, show=shown.append)
    assert trajectory.answer == "banana"
    assert len(shown) == 4
    assert "search: banana" in shown[0]
    assert "#page=2" in shown[0]
    assert "crop: 100, 100, 600, 500" in shown[1]
    assert shown[3].startswith("answer: banana\npages:  ")
    assert trajectory.shown_page_ids[0] in shown[3]
    with pytest.raises(ValueError, match="empty"):
        ask(config, "  ", client=client)


def test_endings():
    fault = Trajectory(
        question_id="q",
        question="?",
        error=ErrorRecord(source="policy", type="Timeout", message="slow"),
        stop_reason=StopReason.ERROR,
    )
    assert ending_text(fault) == "no answer: policy fault, Timeout: slow\npages:  none"
    late = Trajectory(question_id="q", question="?", stop_reason=StopReason.MAX_TURNS)
    assert ending_text(late).startswith("no answer: stopped by max_turns")


def test_a_reply_cannot_steer_the_terminal():
    assert printable("a\n b\x1b[2Jc") == "a b\\x1b[2Jc"
    assert printable("漢字 é") == "漢字 é"
