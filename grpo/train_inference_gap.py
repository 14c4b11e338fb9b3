"""How far the engine that samples is from the policy that is trained, on one fixed reply.

The rows of a step tell the same of what was sampled, but only after the policy was used, and a gap there has
many causes. Here nothing is left but the weights and the two implementations.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rollout.manifest import write_json
from rollout.rows import TrainingRow, messages_row
from visor.env.config import EpisodeConfig
from visor.env.observations import ObservationWriter, prompt_messages
from visor.env.prompts import load_prompts
from visor.models.base import Request, Sampling
from visor.models.decoding import inference
from visor.models.tensors import forward_logprobs
from visor.models.vllm import VLLMClient
from visor.types import Message, Question, TextPart

REPLY_TOKENS = 64
PAGES = 2
TOLERANCE = {torch.float32: 1e-3}
COARSE_TOLERANCE = 0.05
"""Of types with fewer bits: kernels of the two sides round differently in every layer."""
REPLY_FILE = "fixed_reply.json"


@dataclass(frozen=True)
class Gap:
    """|log p of the engine − log p of the trainer| over the tokens of the reply, nats."""

    mean: float
    maximum: float
    tokens: int


def tolerance_of(dtype: torch.dtype) -> float:
    """The mean gap that is rounding, when nothing else is set."""
    return TOLERANCE.get(dtype, COARSE_TOLERANCE)


def probe_messages(
    question: Question, episode: EpisodeConfig, client: VLLMClient, reply_tokens: int
) -> list[Message]:
    """What the fixed reply answers: the question under the run's prompts, and its gold pages as a search
    shows them, at most two and as many as the engine takes."""
    prompts = load_prompts(episode.prompts)
    writer = ObservationWriter(question.text, prompts, episode)
    messages = prompt_messages(question.text, prompts, episode)
    for page_id in question.gold_page_ids[: min(PAGES, client.engine.max_images)]:
        longer = [*messages, writer.page(page_id, verification=False, final=None).message]
        length = len(client.renderer.encode(longer, client.images).input_ids)
        if length + reply_tokens > client.engine.max_context:
            break
        messages = longer
    return messages


class GapProbe:
    """Measures the gap on a reply that is sampled greedily once a run, before its first step."""

    def __init__(
        self,
        client: VLLMClient,
        model,
        collate: Callable[[Sequence[TrainingRow]], dict[str, Tensor]],
        messages: Sequence[Message],
        reply_ids: Sequence[int],
    ) -> None:
        self.client = client
        self.model = model
        self.collate = collate
        reply = Message(
            role="assistant",
            content=[TextPart(text=client.renderer.reply_text(reply_ids))],
            token_ids=list(reply_ids),
        )
        self.prompt = client.renderer.encode(messages, client.images)
        self.row = messages_row(
            [*messages, reply], client.renderer, client.images, train="last", name="the fixed reply"
        )
        self.reply_ids = list(reply_ids)

    def of_engine(self) -> list[float]:
        """(T,) log-probabilities of the reply."""
        return self.client.score(self.prompt, self.reply_ids)

    def of_trainer(self, autocast) -> list[float]:
        """(T,) the same under the policy in training, in the mode it samples in: no dropout."""
        with inference(self.model), torch.no_grad(), autocast():
            logprobs = forward_logprobs(self.model, self.collate([self.row]))[0]
        start = len(self.prompt.input_ids)
        return logprobs[start : start + len(self.reply_ids)].tolist()


def gap_between(ours: Sequence[float], theirs: Sequence[float]) -> Gap:
    distances = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return Gap(sum(distances) / len(distances), max(distances), len(distances))


def fixed_reply(output_dir: Path, client: VLLMClient, messages: Sequence[Message], tokens: int) -> list[int]:
    """The ids of the run's fixed reply: as recorded in its folder, or sampled greedily now and recorded."""
    path = output_dir / REPLY_FILE
    if path.exists():
        return json.loads(path.read_text())["token_ids"]
    request = Request(list(messages), seed=0, sampling=Sampling(temperature=0.0, max_tokens=tokens))
    reply_ids = list(asyncio.run(client.complete(request)).token_ids or [])
    write_json(path, {"schema_version": 1, "token_ids": reply_ids})
    return reply_ids
