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


def policy_update(
    stage, credit="trajectory", settings=None, *, model=None, optimizer=None, accelerator=None, **options
):
    """An update with SGD on the policy of the stage, with a reference beside it."""
    renderer, images, _, path = stage
    model = model or load_model(path)
    reference = load_model(path)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1.01)
    optimizer = (optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1)))(model.parameters())
    return PolicyUpdate(
        accelerator or Accelerator(cpu=True), model, optimizer,
        lambda rows: collate(rows, renderer, images), settings or LossSettings(beta=0.1),
        reference=reference, max_grad_norm=1e9, exact_context=credit == "turn", pad_id=renderer.pad_id,
        **options,
    )  # fmt: skip


def updated(stage, rows, credit="trajectory", settings=None, **options):
    """Weights after one SGD update, and its report."""
    update = policy_update(stage, credit, settings, **options)
    report = update.run(rows, [], seed=0)
    return dict(update.model.named_parameters()), report


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


def test_updates_whose_rows_have_no_gradient_are_skipped(stage):
    """Without a KL term two of the three updates have nothing to train; the old policy was scored before."""
    rows = rows_for(stage, "trajectory")
    options = {"settings": LossSettings(), "gradient_accumulation_steps": 1}
    rows[1].row.advantage = rows[2].row.advantage = 0.0
    weights, report = updated(stage, rows, **options)
    assert len(report.loss) == 3
    assert sum(norm > 0 for norm in report.grad_norm) == 1
    alone, _ = updated(stage, rows[:1], **options)
    assert largest_difference(weights, alone) < 1e-6


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 1, "num_iterations": 2}])
@pytest.mark.parametrize("credit", ["trajectory", "turn"])
def test_padding_for_a_process_with_more_rows_changes_nothing(stage, monkeypatch, credit, options):
    rows = rows_for(stage, credit)[:2]
    expected, report = updated(stage, rows, credit, **options)

    def gather(values):
        """As if another process had one micro-batch more in every update, of rows that weigh nothing."""
        return [*values, values[0] + 1] if isinstance(values[0], int) and values[0] else values

    monkeypatch.setattr("grpo.update.gather_object", gather)
    weights, padded = updated(stage, rows, credit, **options)
    assert largest_difference(weights, expected) < 1e-6
    assert padded.stats.tokens == report.stats.tokens


def test_no_row_and_no_auxiliary_row_leave_the_weights_to_the_bit(stage):
    """AdamW's momentum would move them on its own."""
    rows = rows_for(stage, "trajectory")
    update = policy_update(stage, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    update.run(rows, [], seed=0)
    before = {name: p.detach().clone() for name, p in update.model.named_parameters()}
    report = update.run([], [], seed=0)
    assert (report.loss, report.grad_norm) == ([0.0], [0.0])
    assert largest_difference(before, dict(update.model.named_parameters())) == 0
    report = update.run([], [item.row for item in rows], seed=0)
    assert report.auxiliary_loss[0] > 0


def test_the_gap_is_measured_before_the_policy_moves(stage):
    """Turn rows are exactly what was sampled; a later update must not be taken for a broken row."""
    rows = rows_for(stage, "turn")
    _, report = updated(
        stage, rows, "turn", LossSettings(), gradient_accumulation_steps=1, max_logprob_gap=1e-4,
    )  # fmt: skip
    assert len(report.loss) == len(rows)
    assert report.gap_max < 1e-5
    assert 0 < report.gap_tokens < sum(item.tokens for item in rows)
    rows[0].row.old_logprobs = [value and value - 0.5 for value in rows[0].row.old_logprobs]
    with pytest.raises(ValueError, match="log-probabilities differ"):
        updated(stage, rows[:1], "turn", LossSettings(), max_logprob_gap=1e-4)


def test_the_old_policy_is_scored_without_dropout(stage):
    from visor.models.lora import add_lora

    renderer, images, _, path = stage
    model = add_lora(load_model(path), rank=4, alpha=64, dropout=0.5, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    update = policy_update(stage, model=model)
    model.train()
    rows = rows_for(stage, "trajectory")
    scored = update._rescored(rows)
    assert all(module.training for module in model.modules())
    model.eval()
    for item in rows:
        with torch.no_grad():
            exact = forward_logprobs(model, collate([item.row], renderer, images))[0]
        assert torch.allclose(scored[id(item)], exact, atol=1e-5)


class TwoProcesses(Accelerator):
    num_processes = 2


def test_the_auxiliary_loss_does_not_depend_on_the_number_of_processes(stage, monkeypatch):
    """Shares of 1 and 2 rows of other lengths; what data parallelism makes of gradients is their mean."""
    rows = [item.row for item in rows_for(stage, "trajectory")]
    tokens = [sum(row.loss_mask) for row in rows]
    assert tokens[0] * 2 != tokens[1] + tokens[2]

    def gradients(part, **options):
        update = policy_update(stage, auxiliary_weight=0.3, **options)
        loss = update._auxiliary_backward(part, sum(tokens))
        return loss, {name: p.grad for name, p in update.model.named_parameters() if p.grad is not None}

    loss, whole = gradients(rows)
    shares = [gradients(part, accelerator=TwoProcesses(cpu=True)) for part in (rows[:1], rows[1:])]
    assert sum(share for share, _ in shares) == pytest.approx(loss, rel=1e-5)
    for name, gradient in whole.items():
        total = sum(part.get(name, 0) for _, part in shares)  # a row without a picture: no vision gradient
        assert torch.allclose(total / 2, gradient, atol=1e-6), name
    # A process without a row takes part with nothing; the token count comes from the other.
    monkeypatch.setattr(
        "grpo.update.gather_object", lambda values: [values[0] + 5] if values == [0] else values
    )
    report = policy_update(stage, auxiliary_weight=0.3).run([], [], seed=0)
    assert report.auxiliary_loss == [0.0]


def test_turn_rows_over_the_limit_are_counted(stage):
    renderer, images, group, _ = stage
    lengths = sorted(len(item.row.input_ids) for item in rows_for(stage, "turn"))

    def count(build, max_length):
        step = rows_of_groups([group], build, max_length=max_length)
        return len(step.rows), step.rows_over_length

    def turns(trajectory):
        return turn_rows(trajectory, renderer, images)

    def whole(trajectory):
        return [trajectory_row(trajectory, renderer, images, max_length=4)]

    over = sum(length > lengths[2] for length in lengths)
    assert over > 0
    assert count(turns, lengths[2]) == (len(lengths) - over, over)
    assert count(turns, None) == (len(lengths), 0)
    assert count(whole, 4) == (0, 3)
