"""The policy update on rows with pictures: micro-batches, credit modes, old log-probabilities."""

import asyncio

import pytest
import torch
from accelerate import Accelerator
from training_world import EPISODE

from data.corpus import Corpus
from data.questions import load_questions
from grpo.batch import rows_of_groups
from grpo.loss import LossSettings
from grpo.update import PolicyUpdate
from rollout.group import Group
from rollout.rows import trajectory_row, turn_rows
from visor.env.config import EpisodeConfig
from visor.env.crop import ImageCutter
from visor.env.prompts import load_prompts
from visor.models.base import Sampling
from visor.models.loading import load_model, load_processor
from visor.models.tensors import collate, forward_logprobs
from visor.retrieval.index import open_index
from visor.systems.visor import VisorSystem
from visor.types import Completion, FinishReason, RewardBreakdown

THINK = "<think> page</think>"
REPLIES = {
    0: [
        "<think> page apple</think><search> apple number</search>",
        "<think> page apple 1 .</think><answer> 1</answer>",
    ],
    1: ["<search> brick number</search>", "<search> cloud number</search>", f"{THINK}<answer> 3</answer>"],
    2: [f"{THINK}<answer> 7</answer>"],
}
REWARDS = {0: 1.0, 1: -0.3, 2: -1.0}


class Actor:
    """Plays the replies of one sample, with ids and log-probabilities as if they had been sampled."""

    name = "actor"

    def __init__(self, renderer, images, model, replies):
        self.renderer, self.images, self.model, self.replies = renderer, images, model, list(replies)

    async def complete(self, request):
        from visor.types import Message, TextPart

        text = self.replies.pop(0)
        ids = self.renderer.reply_ids(text)
        reply = Message(role="assistant", content=[TextPart(text=text)], token_ids=ids)
        from rollout.rows import messages_row

        row = messages_row([*request.messages, reply], self.renderer, self.images, train="last")
        with torch.no_grad():
            scored = forward_logprobs(self.model, collate([row], self.renderer, self.images))[0]
        return Completion(
            text=text, token_ids=ids, logprobs=scored[torch.tensor(row.loss_mask).bool()].tolist()
        )


@pytest.fixture(scope="module")
def stage(world):
    processor = load_processor(world / "policy")
    corpus = Corpus.open(world / "corpus")
    images = ImageCutter(corpus)
    renderer = processor.renderer()
    model = load_model(world / "policy")
    question = load_questions(f"questions:{world / 'questions.jsonl'}", corpus)[0]
    config = EpisodeConfig(**EPISODE)
    retriever = open_index(world / "corpus" / "index" / "bm25", corpus)
    trajectories = []
    for sample, replies in REPLIES.items():
        actor = Actor(renderer, images, model, replies)
        system = VisorSystem(actor, retriever, corpus, config, load_prompts("tiny"), Sampling())
        trajectory = asyncio.run(system.solve(question, sample_index=sample))
        assert trajectory.error is None, trajectory.error
        trajectory.reward = RewardBreakdown(total=REWARDS[sample])
        trajectories.append(trajectory)
    return renderer, images, Group(question, trajectories), world / "policy"


def rows_for(stage, credit):
    renderer, images, group, _ = stage
    build = {
        "trajectory": lambda t: [trajectory_row(t, renderer, images)],
        "turn": lambda t: turn_rows(t, renderer, images),
    }[credit]
    return rows_of_groups([group], build).rows


def updated(stage, rows, credit="trajectory", settings=None, **options):
    """Weights after one SGD update, and its report."""
    renderer, images, _, path = stage
    model = load_model(path)
    reference = load_model(path)
    settings = settings or LossSettings(beta=0.1)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1.01)
    update = PolicyUpdate(
        Accelerator(cpu=True), model, torch.optim.SGD(model.parameters(), lr=0.1),
        lambda rows: collate(rows, renderer, images), settings, reference=reference, max_grad_norm=1e9,
        exact_context=credit == "turn", pad_id=renderer.pad_id, **options,
    )  # fmt: skip
    report = update.run(rows, [], seed=0)
    return dict(model.named_parameters()), report


def largest_difference(one, other):
    return max((one[name] - other[name]).abs().max().item() for name in one)


@pytest.mark.parametrize("credit", ["trajectory", "turn"])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_micro_batch_size_changes_nothing(stage, credit, loss_type):
    rows = rows_for(stage, credit)
    settings = LossSettings(loss_type=loss_type, beta=0.1)
    weights, report = updated(stage, rows, credit, settings, micro_batch_size=8)
    start = dict(load_model(stage[3]).named_parameters())
    assert largest_difference(weights, start) > 1e-4
    for size in (1, 2):
        other, other_report = updated(stage, rows, credit, settings, micro_batch_size=size)
        assert largest_difference(weights, other) < 1e-6
        assert other_report.loss == pytest.approx(report.loss, abs=1e-6)
        assert other_report.stats.kl == pytest.approx(report.stats.kl, rel=1e-4)


def test_loss_and_gradient_equal_one_plain_formula(stage):
    """The update against autograd on the token mean written out over the rows."""
    renderer, images, _, path = stage
    rows = rows_for(stage, "trajectory")
    weights, _ = updated(stage, rows, settings=LossSettings(), micro_batch_size=2)
    model = load_model(path).train()
    total = sum(item.tokens for item in rows)
    loss = 0.0
    for item in rows:
        logprobs = forward_logprobs(model, collate([item.row], renderer, images))
        loss = (
            loss
            - item.row.advantage * torch.exp(logprobs - logprobs.detach()).mul(logprobs != 0).sum() / total
        )
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(weights[name], parameter - 0.1 * parameter.grad, atol=1e-6), name


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_both_credit_modes_give_a_trajectory_the_same_weight(stage, loss_type):
    from collections import Counter

    from grpo.loss import row_coefficients

    sums = {}
    for credit in ("trajectory", "turn"):
        rows = rows_for(stage, credit)
        names = [item.row.trajectory for item in rows]
        weights = row_coefficients([item.tokens for item in rows], names, LossSettings(loss_type=loss_type))
        sums[credit] = Counter()
        for item, name, weight in zip(rows, names, weights):
            sums[credit][name] += weight * item.tokens
    assert len(sums["turn"]) == 3
    assert sums["turn"] == pytest.approx(sums["trajectory"])


def test_several_updates_score_the_old_policy_before_the_first(stage):
    rows = rows_for(stage, "trajectory")
    _, single = updated(stage, rows, settings=LossSettings(), micro_batch_size=1)
    _, several = updated(
        stage, rows, settings=LossSettings(epsilon=0.01), micro_batch_size=1, gradient_accumulation_steps=1,
        num_iterations=3,
    )  # fmt: skip
    assert len(several.loss) == 9
    assert single.stats.clipped == 0
    assert several.stats.clipped > 0
    assert several.gap_tokens == single.gap_tokens == sum(item.tokens for item in rows)
    assert several.gap_sum == pytest.approx(single.gap_sum, rel=1e-4)


def test_zero_advantage_rows_keep_their_place_in_the_token_mean(stage):
    rows = rows_for(stage, "trajectory")
    whole, _ = updated(stage, rows, settings=LossSettings(), micro_batch_size=8)
    rows[2].row.advantage = 0.0
    dropped, report = updated(stage, rows, settings=LossSettings(), micro_batch_size=8)
    assert report.stats.tokens == rows[0].tokens + rows[1].tokens
    rows[2].excluded = True
    without, _ = updated(stage, rows, settings=LossSettings(), micro_batch_size=8)
    start = dict(load_model(stage[3]).named_parameters())
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    ratio = ((without[name] - start[name]) / (dropped[name] - start[name])).nanmedian().item()
    assert ratio == pytest.approx(sum(r.tokens for r in rows) / (rows[0].tokens + rows[1].tokens), rel=1e-3)
    assert largest_difference(whole, dropped) > 0


def test_truncated_replies_are_excluded_on_request(stage):
    renderer, images, group, _ = stage
    group.trajectories[1].turns[0].completion.finish_reason = FinishReason.LENGTH

    def build(trajectory):
        return turn_rows(trajectory, renderer, images)

    try:
        rows = rows_of_groups([group], build, mask_truncated_completions=True).rows
        assert [item.excluded for item in rows] == [False, False, True, True, True, False]
        advantages = {item.row.trajectory: item.row.advantage for item in rows}
        kept = rows_of_groups([group], build).rows
        assert advantages == {item.row.trajectory: item.row.advantage for item in kept}
        assert not any(item.excluded for item in kept)
    finally:
        group.trajectories[1].turns[0].completion.finish_reason = FinishReason.STOP


def test_an_update_without_rows_does_nothing(stage):
    weights, report = updated(stage, [])
    assert largest_difference(weights, dict(load_model(stage[3]).named_parameters())) == 0
    assert report.loss == [0.0]
