"""Batched decoding of a Qwen2.5-VL model: one left-padded prefill, then one token a step for all.

B sequences are decoded from U distinct prompts: sequences with the same prompt share its prefill.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers.cache_utils import Cache, DynamicLayer

from visor.models.loading import unwrap
from visor.models.sampling import Sampler
from visor.models.versions import CACHE_ARGUMENT
from visor.stage_clock import CLOCK

GROWTH = 64


class BufferedLayer(DynamicLayer):
    """Keys and values of one layer in a buffer with room for `GROWTH` more positions, so that a step writes
    one position where Transformers' own layer copies all of them."""

    def __init__(self):
        super().__init__()
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if self._buffers is None or self._buffers[0].shape[-2] < end:
            self._buffers = (
                self._grown(self.keys, key_states, end),
                self._grown(self.values, value_states, end),
            )
        for buffer, states in zip(self._buffers, (key_states, value_states)):
            buffer[:, :, start:end] = states
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)
        return self.keys, self.values

    @staticmethod
    def _grown(old: torch.Tensor | None, states: torch.Tensor, end: int) -> torch.Tensor:
        batch, heads, _, width = states.shape
        buffer = states.new_empty((batch, heads, end + GROWTH, width))
        if old is not None and old.numel():
            buffer[:, :, : old.shape[-2]] = old
        return buffer

    def select(self, rows: torch.Tensor) -> None:
        """Keep or repeat rows of the batch."""
        assert self.keys is not None, "a layer without keys has no rows"
        assert self.values is not None
        self.keys, self.values = self.keys[rows], self.values[rows]
        self._buffers = None


@dataclass
class Sampled:
    """One decoded reply."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-softmax of the model's logits at temperature 1, nothing banned: what a trainer re-scores."""
    stopped: bool = False
    """True when it ended with a stop id, False when it reached its length limit."""


@contextmanager
def inference(model):
    """Eval and inference mode inside; every module's train mode is put back at the end."""
    modes = [(module, module.training) for module in model.modules()] if model.training else []
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module, training in modes:
            module.training = training


def decode(
    model,
    batch: dict[str, torch.Tensor],
    features: list[torch.Tensor],
    prompt_of: list[int],
    limits: list[int],
    sampler: Sampler,
    stop_ids: frozenset[int],
) -> list[Sampled]:
    """Sample one reply for each sequence.

    `batch` holds the U distinct prompts, padded on the left (`collate`), `features` their images in order;
    `prompt_of[b]` is the prompt of sequence b and `limits[b]` the length limit of its reply. Run inside
    `inference`.
    """
    run = _Run(model, batch, features, prompt_of, limits, sampler, stop_ids)
    step = 0
    while run.advance(step):
        step += 1
        CLOCK.progress()
    return run.replies


class _Run:
    """State of the sequences that are still being decoded."""

    def __init__(self, model, batch, features, prompt_of, limits, sampler, stop_ids):
        self.base = unwrap(model)
        self.language_model = self.base.model.language_model
        self.sampler, self.stop_ids, self.limits = sampler, stop_ids, limits
        self.replies = [Sampled() for _ in prompt_of]
        self.device = batch["input_ids"].device
        self.live = list(range(len(prompt_of)))
        self.done = [False] * len(prompt_of)
        self.layers = [BufferedLayer() for _ in range(self.base.config.text_config.num_hidden_layers)]
        self.cache = Cache(layers=list(self.layers))
        self._prefill(batch, features, torch.tensor(prompt_of, device=self.device))

    def _prefill(self, batch, features: list[torch.Tensor], rows: torch.Tensor) -> None:
        embeddings = self.base.get_input_embeddings()(batch["input_ids"])
        if features:
            pads = batch["mm_token_type_ids"].bool()
            embeddings[pads] = torch.cat(features).to(embeddings.dtype)
        hidden = self._forward(embeddings, batch["attention_mask"], batch["position_ids"])
        self.logits = self.base.lm_head(hidden[:, -1]).float()[rows]
        for layer in self.layers:
            layer.select(rows)
        self.mask = batch["attention_mask"][rows]
        self.position = batch["position_ids"].amax((0, 2))[rows]

    def _forward(self, embeddings, mask, positions) -> torch.Tensor:
        mask = None if bool(mask.all()) else mask
        return self.language_model(
            inputs_embeds=embeddings,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{CACHE_ARGUMENT: self.cache},
        ).last_hidden_state

    def advance(self, step: int) -> bool:
        """Sample token number `step` of each live sequence and run the model on it; False when all ended."""
        chosen = self.sampler(self.logits, step)
        logprobs = self.logits.gather(-1, chosen[:, None]).squeeze(-1) - self.logits.logsumexp(-1)
        for row, (token, logprob) in enumerate(zip(chosen.tolist(), logprobs.tolist())):
            self._record(row, token, logprob)
        rows = [row for row in range(len(self.live)) if not self.done[row]]
        if not rows:
            return False
        if len(rows) * 2 <= len(self.live):
            chosen = self._compact(rows, chosen)
        self.position += 1
        self.mask = torch.cat([self.mask, self.mask.new_ones((len(self.live), 1))], 1)
        embeddings = self.base.get_input_embeddings()(chosen[:, None])
        hidden = self._forward(embeddings, self.mask, self.position[None, :, None].expand(3, -1, -1))
        self.logits = self.base.lm_head(hidden[:, -1]).float()
        return True

    def _record(self, row: int, token: int, logprob: float) -> None:
        if self.done[row]:
            return
        reply = self.replies[self.live[row]]
        reply.token_ids.append(token)
        reply.logprobs.append(logprob)
        reply.stopped = token in self.stop_ids
        self.done[row] = reply.stopped or len(reply.token_ids) == self.limits[self.live[row]]

    def _compact(self, rows: list[int], chosen: torch.Tensor) -> torch.Tensor:
        """Drop the finished sequences."""
        index = torch.tensor(rows, device=self.device)
        for layer in self.layers:
            layer.select(index)
        self.sampler.keep(index)
        self.mask, self.position = self.mask[index], self.position[index]
        self.live = [self.live[row] for row in rows]
        self.done = [False] * len(rows)
        return chosen[index]
