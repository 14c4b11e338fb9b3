"""Figures of a step's trajectories, by hand; the time of a step; the line a person reads."""

import math

import pytest

from grpo.behaviour import behaviour_metrics, reward_parts
from grpo.highlights import best_and_worst, trajectory_text, write_highlights
from grpo.records import forget_after
from grpo.step_metrics import STAGES, step_seconds, summary
from rollout.group import Group
from visor.types import (
    Answer,
    Completion,
    Crop,
    Question,
    RewardBreakdown,
    Search,
    StopReason,
    Trajectory,
    Turn,
)

QUESTION = Question(
    question_id="q", text="How many\x1b[2J ships?", gold_answers=["12"], gold_page_ids=["d#page=1"]
)


def turn(index, action, sizes=((56, 28),), prompt=10, sampled=3):
    completion = Completion(
        text="t", token_ids=[1] * sampled, prompt_token_ids=[2] * prompt,
        image_sizes=None if sizes is None else list(sizes),
    )  # fmt: skip
    return Turn(index=index, context=[], completion=completion, think="as seen", action=action)


def trajectory(sample, reward, *turns, stop=StopReason.ANSWER):
    return Trajectory(
        question_id="q", question="?", sample_index=sample, turns=list(turns), answer="12", reward=reward,
        stop_reason=stop,
    )  # fmt: skip


@pytest.fixture
def groups():
    visor = RewardBreakdown(total=1.0, retrieval=0.0, answer=1.0, searches=2, complete_at=1, delta=1)
    incomplete = RewardBreakdown(total=-1.0, retrieval=-1.0, answer=0.0, searches=1)
    over = RewardBreakdown(total=-1.0, format_penalty=1, retrieval=0.0, answer=0.0, delta=7)
    unscored = RewardBreakdown(total=None, unscored_reason="judge fault: down", delta=0)
    search, crop = Search(query="s"), Crop(box=(0, 0, 9, 9), space="norm1000")
    first = Group(
        QUESTION,
        [
            trajectory(
                0, visor, turn(0, search, sizes=[]), turn(1, crop, prompt=30), turn(2, Answer(text="12"))
            ),
            trajectory(1, incomplete, turn(0, search, sizes=[(56, 56), (28, 28)], prompt=20)),
            trajectory(2, unscored, turn(0, crop, sizes=None), stop=StopReason.LENGTH),
        ],
    )  # fmt: skip
    alone = Group(QUESTION.model_copy(update={"gold_page_ids": []}), [trajectory(3, over)])
    return [first, alone]


def test_figures_by_hand(groups):
    figures = behaviour_metrics(groups)
    assert figures["reward_parts"] == pytest.approx(
        {"answer": 1 / 3, "format_penalty": 1 / 3, "retrieval": -1 / 3}
    )
    assert figures["reward_std"] == pytest.approx(math.sqrt((4 / 3) ** 2 / 2 + 2 * (2 / 3) ** 2 / 2))
    assert figures["group_reward_std"] == pytest.approx(math.sqrt(2))  # of the first; the second has one
    assert figures["delta_counts"] == {"0": 1, "1": 1, "incomplete": 1}  # the last has no gold pages
    assert figures["crop_rate"] == 2 / 4
    assert figures["stop_reasons"] == {"answer": 3, "length": 1}
    # Calls with known images: none, 2 tokens, 2 tokens, 4 + 1 tokens.
    assert figures["visual_tokens_per_call"] == (0 + 2 + 2 + 5) / 4
    assert figures["visual_tokens_max"] == 5
    assert figures["prompt_tokens_per_call"] == (10 + 30 + 10 + 20 + 10) / 5
    assert figures["sampled_tokens"] == 15


def test_nothing_sampled_divides_by_nothing():
    figures = behaviour_metrics([])
    assert figures["reward_parts"] == figures["delta_counts"] == figures["stop_reasons"] == {}
    assert {figures[name] for name in ("reward_std", "group_reward_std", "crop_rate")} == {None}
    assert figures["sampled_tokens"] == 0


def test_a_reward_that_names_its_parts_shows_those():
    own = RewardBreakdown(total=0.5, parts={"judge": 1.0, "ndcg": 0.5})
    assert reward_parts(own) == {"judge": 1.0, "ndcg": 0.5}
    assert reward_parts(RewardBreakdown(total=-1.0, format_penalty=1)) == {"format_penalty": 1.0}


def test_large_deltas_are_counted_together(groups):
    groups[1].question = QUESTION
    assert behaviour_metrics(groups)["delta_counts"] == {"0": 1, "1": 1, "4+": 1, "incomplete": 1}


def test_best_and_worst(groups, tmp_path):
    best, worst = best_and_worst(groups)
    assert (best.name, best.reward, worst.name, worst.reward) == ("q/0", 1.0, "q/1", -1.0)
    for line in ("gold answers: 12", "search: s", "crop: 0, 0, 9, 9 (norm1000)", "answer: 12", "Δ = 1"):
        assert line in best.text
    assert "\x1b" not in best.text
    assert "incomplete" in worst.text
    assert "unscored: judge fault: down" in trajectory_text(groups[0].trajectories[2], QUESTION)
    assert best_and_worst([Group(QUESTION, [groups[0].trajectories[2]])]) is None
    for step in (4, 8):
        write_highlights(tmp_path, step, best, worst)
    text = (tmp_path / "highlights" / "step-8.txt").read_text()
    assert text.index("best of step 8") < text.index("worst of step 8")
    forget_after(tmp_path, 4)
    assert [path.name for path in (tmp_path / "highlights").iterdir()] == ["step-4.txt"]


def test_the_shares_of_a_step():
    laps = {"rollout": 6.0, "rows": 1.0, "record": 1.0, "update": 2.0}
    seconds = step_seconds(laps, {"decode": 5.0, "update": 2.0, "other": 9.0})
    assert seconds["total"] == 10
    assert list(seconds["stages"]) == list(seconds["shares"]) == list(STAGES)
    assert [seconds["shares"][stage] for stage in ("decode", "update", "crop")] == [0.5, 0.2, 0]
    assert step_seconds({}, {})["shares"]["decode"] == 0.0


def test_the_progress_line():
    metrics = {
        "step": 3, "reward": 0.4249, "accuracy": 0.5, "completeness": None, "verification_share": 0.25,
        "finish_rate": 1.0, "kl": None, "entropy": 1.234, "groups": 8, "groups_dropped": 3,
        "seconds": step_seconds(
            {"rollout": 7.0, "update": 3.0}, {"decode": 6.0, "update": 3.0, "crop": 0.01}
        ),
    }  # fmt: skip
    line = summary(metrics, 100, mean_seconds=60.0)
    assert line == (
        "step 3/100  reward 0.42  accuracy 0.50  complete –  Δ=1 0.25  finish 1.00  groups 5/8  kl –  "
        "entropy 1.23  10.0 s (decode 60%, update 30%)  97 min left"
    )
    assert "left" not in summary({**metrics, "step": 100}, 100, mean_seconds=60.0)
    for seconds, shown in ((0.5, "48 s left"), (120, "3 h 14 min left"), (3600, "4 d 1 h left")):
        assert summary(metrics, 100, mean_seconds=seconds).endswith(shown)
