"""Three recorded trajectories of one question, with pictures, and the policy update on their rows."""

import asyncio

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
from visor.types import Completion, RewardBreakdown

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


def make_stage(world):
    """(renderer, images, group, folder of the policy)."""
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
