"""Rows with advantages → optimizer updates of the policy.

B = rows of a micro-batch, L = tokens of its longest row.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from accelerate.utils import DistributedType, gather_object
from torch import Tensor

from grpo.batch import PolicyRow
from grpo.loss import LossSettings, LossStats, policy_loss, row_coefficients
from grpo.micro_batches import MicroBatching, Padding
from rollout.rows import TrainingRow
from visor.models.tensors import forward_logprobs

Collate = Callable[[Sequence[TrainingRow]], dict[str, Tensor]]
"""Rows → a padded batch on the training device."""


@dataclass(frozen=True)
class Lockstep:
    """Processes that exchange gradients or weights layer by layer (DeepSpeed, FSDP) must all run the same
    layers equally often: one that does not leaves the others waiting for it."""

    add_picture: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    """A batch, with a picture without influence where it has none, so that it runs the vision tower. It is
    needed even where no process has one: of parameters without a gradient ZeRO-3 applies that of the update
    before."""
    splits_weights: bool
    """True: a forward pass without gradient, too, is one of all processes."""


@dataclass
class UpdateReport:
    """Over the updates of one step; sums are over all processes once `gathered` was called."""

    loss: list[float] = field(default_factory=list)
    """Policy loss of each update, before the auxiliary loss."""
    auxiliary_loss: list[float] = field(default_factory=list)
    """Token mean over the auxiliary rows of all processes; empty when there are none."""
    grad_norm: list[float] = field(default_factory=list)
    stats: LossStats = field(default_factory=LossStats)
    gap_sum: float = 0.0
    """Σ |log p under the training row − log p at sampling| over `gap_tokens`."""
    gap_max: float = 0.0
    gap_tokens: float = 0.0
    padding: Padding = field(default_factory=Padding)
    """Of the passes with a gradient."""

    def gathered(self) -> UpdateReport:
        """Add up the reports of all processes."""
        parts: list[UpdateReport] = gather_object([self])
        total = UpdateReport(grad_norm=self.grad_norm)
        total.loss = [sum(values) for values in zip(*(part.loss for part in parts))]
        total.auxiliary_loss = [sum(values) for values in zip(*(part.auxiliary_loss for part in parts))]
        total.stats = sum((part.stats for part in parts), LossStats())
        total.gap_sum = sum(part.gap_sum for part in parts)
        total.gap_max = max(part.gap_max for part in parts)
        total.gap_tokens = sum(part.gap_tokens for part in parts)
        total.padding = sum((part.padding for part in parts), Padding())
        return total


class PolicyUpdate:
    """The optimization of one step: iterations × updates × micro-batches.

    With a single update a step the old policy is the present one, so its log-probabilities are taken from the
    update's own forward pass (ratio 1) instead of a pass of their own; `exact_context` rows (turn mode) keep
    those of sampling in every case.
    """

    def __init__(
        self,
        accelerator,
        model,
        optimizer,
        collate: Collate,
        settings: LossSettings,
        *,
        reference=None,
        micro_batch_size: int = 1,
        max_tokens_per_micro_batch: int | None = None,
        gradient_accumulation_steps: int | None = None,
        num_iterations: int = 1,
        max_grad_norm: float = 1.0,
        exact_context: bool = False,
        max_logprob_gap: float | None = None,
        auxiliary_weight: float = 0.0,
        pad_id: int = 0,
        lockstep: Lockstep | None = None,
    ) -> None:
        self.accelerator = accelerator
        self.model = model
        self.optimizer = optimizer
        self.collate = collate
        self.settings = settings
        self.reference = reference
        self.micro_batches: MicroBatching = MicroBatching(micro_batch_size, max_tokens_per_micro_batch)
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.num_iterations = num_iterations
        self.max_grad_norm = max_grad_norm
        self.exact_context = exact_context
        self.max_logprob_gap = max_logprob_gap
        self.auxiliary_weight = auxiliary_weight
        self.lockstep = lockstep
        # Stands in for rows on a process that has fewer micro-batches than the others; its weight is 0.
        self.empty_row = TrainingRow(input_ids=[pad_id] * 2, loss_mask=[0, 1])

    def run(self, rows: Sequence[PolicyRow], auxiliary: Sequence[TrainingRow], seed: int) -> UpdateReport:
        """Train on the rows of one step and on the auxiliary rows, which join every update."""
        self.model.train()
        report = UpdateReport()
        updates = self._split(rows, seed)
        single = len(updates) == 1 and self.num_iterations == 1
        old = {} if single or self.exact_context else self._rescored(rows)
        moved = False
        for iteration in range(self.num_iterations):
            for update in updates:
                # Without log-probabilities from before the updates, a policy that has moved is another one
                # than sampled: what differs then is no fault of the rows.
                measure_gap = iteration == 0 and (bool(old) or not moved)
                moved |= self._update(update, auxiliary, old, report, measure_gap)
        return report.gathered()

    # ------------------------------------------------------------ one update

    def _update(self, rows, auxiliary, old, report: UpdateReport, measure_gap: bool) -> bool:
        """One optimizer step; False when no process has a row with a gradient, and nothing is moved then (the
        optimizer's momentum alone would move the weights)."""
        coefficients = self._coefficients(rows)
        batches = self._micro_batches(rows, coefficients)
        auxiliary_tokens = sum(gather_object([sum(sum(row.loss_mask) for row in auxiliary)]))
        if not batches and not auxiliary_tokens:
            report.loss.append(0.0)
            report.grad_norm.append(0.0)
            return False
        if auxiliary_tokens:
            report.auxiliary_loss.append(self._auxiliary_backward(auxiliary, auxiliary_tokens, report))
        batches = batches or [self._padding(coefficients)]
        total = 0.0
        for index, batch in enumerate(batches):
            with self._synchronised(index == len(batches) - 1):
                loss = self._batch_loss(batch, coefficients, old, report, measure_gap)
                # Processes average their gradients, but the coefficients are shares of one global sum.
                self._backward(loss * self.accelerator.num_processes)
            total += loss.item()
        self._fill_gradients()
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        report.loss.append(total)
        report.grad_norm.append(float(norm) if norm is not None else 0.0)
        return True

    def _fill_gradients(self) -> None:
        """Parameters that no row reaches (the vision tower's, without pictures) have the gradient 0, as under
        DeepSpeed: an optimizer's momentum then does not depend on the launch."""
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            return
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _batch_loss(self, batch_rows, coefficients, old, report: UpdateReport, measure_gap: bool) -> Tensor:
        report.padding.add([item.row for item in batch_rows])
        batch = self._batch([item.row for item in batch_rows])
        logprobs, entropy = forward_logprobs(self.model, batch, entropy=True)
        reference = None
        if self.reference is not None:
            with torch.no_grad(), self.accelerator.autocast():
                reference = forward_logprobs(self.reference, batch)
        sampled = batch.get("old_logprobs")
        if self.exact_context and sampled is not None:
            before = sampled
        elif old:
            # Padding has no score of its own, and weight 0.
            scored = [old.get(id(item), now) for item, now in zip(batch_rows, logprobs.detach())]
            before = _padded(scored, logprobs)
        else:
            before = logprobs.detach()
        device = logprobs.device
        weights = torch.tensor([coefficients[id(item)] for item in batch_rows], device=device)
        advantages = torch.tensor([item.row.advantage for item in batch_rows], device=device)
        mask = batch["loss_mask"].to(logprobs.dtype)
        if measure_gap and sampled is not None:
            rescored = before if old else logprobs.detach()
            self._measure_gap(batch_rows, (rescored - sampled).abs() * mask, mask, report)
        loss, stats = policy_loss(
            logprobs, before, advantages, mask, weights, self.settings, reference, entropy
        )
        report.stats = report.stats + stats
        return loss

    def _measure_gap(self, rows, gap: Tensor, mask: Tensor, report: UpdateReport) -> None:
        """Compare the log-probabilities under the training rows with those at sampling."""
        means = (gap.sum(-1) / mask.sum(-1).clamp(min=1)).tolist()
        if self.exact_context and self.max_logprob_gap is not None:
            for item, mean in zip(rows, means):
                if mean > self.max_logprob_gap:
                    raise ValueError(
                        f"{item.row.trajectory}, turn {item.row.turn_index}: log-probabilities differ from "
                        f"those at sampling by {mean:.3f} on average, above max_logprob_gap = "
                        f"{self.max_logprob_gap}; the row is not what was sampled, or the sampling engine "
                        "computes too coarsely"
                    )
        report.gap_sum += gap.sum().item()
        report.gap_max = max(report.gap_max, gap.max().item())
        report.gap_tokens += mask.sum().item()

    def _auxiliary_backward(
        self, rows: Sequence[TrainingRow], total_tokens: int, report: UpdateReport
    ) -> float:
        """Add the gradient of weight × token-mean loss of the auxiliary rows of all processes; returns the
        share of this process's rows in that mean. `total_tokens`: trained tokens on all processes."""
        factor = self.auxiliary_weight * self.accelerator.num_processes  # processes average their gradients
        value = 0.0
        parts = self.micro_batches.split(rows, lambda row: len(row.input_ids))
        for part in self._filled_up(parts) if self.lockstep else parts:
            if part:
                report.padding.add(part)
            batch = self._batch(part or [self.empty_row])
            with self._synchronised(False):
                loss = -forward_logprobs(self.model, batch).sum() / total_tokens * bool(part)
                self._backward(loss * factor)
            value += loss.item()
        return value

    def _backward(self, loss: Tensor) -> None:
        # Rows without pictures have no gradient where the language model is frozen.
        if loss.requires_grad:
            self.accelerator.backward(loss)

    # ------------------------------------------------------------ processes in step

    def _batch(self, rows: Sequence[TrainingRow]) -> dict[str, Tensor]:
        batch = self.collate(rows)
        return self.lockstep.add_picture(batch) if self.lockstep else batch

    @staticmethod
    def _filled_up(parts: list[list]) -> list[list]:
        """With empty parts to as many as the process with the most has."""
        return parts + [[]] * (max(gather_object([len(parts)])) - len(parts))

    # ------------------------------------------------------------ splitting and weighing

    def _split(self, rows: Sequence[PolicyRow], seed: int) -> list[list[PolicyRow]]:
        """The rows of each update; as many updates on every process."""
        if self.gradient_accumulation_steps is None:
            return [list(rows)]
        shuffled = list(rows)
        random.Random(seed).shuffle(shuffled)
        size = self.micro_batches.rows * self.gradient_accumulation_steps
        count = max(1, *gather_object([-(-len(rows) // size)]))
        return [shuffled[i * size : (i + 1) * size] for i in range(count)]

    def _coefficients(self, rows: Sequence[PolicyRow]) -> dict[int, float]:
        """The weight of each local row (by id) among the rows of this update on all processes."""
        rank = self.accelerator.process_index
        mine = [(item.tokens, f"{rank}:{item.row.trajectory}", item.excluded) for item in rows]
        everyone = gather_object([mine])
        flat = [entry for part in everyone for entry in part]
        weights = row_coefficients(
            [tokens for tokens, _, _ in flat],
            [trajectory for _, trajectory, _ in flat],
            self.settings,
            excluded=[excluded for _, _, excluded in flat],
        )
        first = sum(len(part) for part in everyone[:rank])
        return {id(item): weight for item, weight in zip(rows, weights[first : first + len(rows)])}

    def _micro_batches(self, rows, coefficients: dict[int, float]) -> list[list[PolicyRow]]:
        """Rows that have a gradient, longest first, in micro-batches; as many on every process, none when no
        process has such a row."""
        active = [item for item in rows if coefficients[id(item)] and self._has_gradient(item)]
        parts = self._filled_up(self.micro_batches.split(active, _length))
        return [part or self._padding(coefficients) for part in parts]

    def _padding(self, coefficients: dict[int, float]) -> list[PolicyRow]:
        """A micro-batch without a gradient, entered into the coefficients with weight 0."""
        padding = PolicyRow(self.empty_row, excluded=True)
        coefficients[id(padding)] = 0.0
        return [padding]

    def _has_gradient(self, item: PolicyRow) -> bool:
        # Without a KL term a zero advantage means zero loss: the row keeps its place in the token mean only.
        return bool(item.row.advantage) or self.settings.beta > 0

    def _rescored(self, rows: Sequence[PolicyRow]) -> dict[int, Tensor]:
        """Log-probabilities (L,) of each row under the policy before the updates, by id; without dropout, as
        at sampling."""
        scored = {}
        model = self.accelerator.unwrap_model(self.model)
        model.eval()
        parts = self.micro_batches.split(rows, _length)
        if self.lockstep is not None and self.lockstep.splits_weights:
            parts = self._filled_up(parts)
        for part in parts:
            batch = self._batch([item.row for item in part] or [self.empty_row])
            with torch.no_grad(), self.accelerator.autocast():
                logprobs = forward_logprobs(model, batch)
            for item, values in zip(part, logprobs):
                scored[id(item)] = values[: len(item.row.input_ids)]
        self.model.train()
        return scored

    def _synchronised(self, last: bool):
        """Gradients travel between processes with the last micro-batch of an update only."""
        self.accelerator.gradient_state._set_sync_gradients(last)
        return nullcontext() if last else self.accelerator.no_sync(self.model)


def _length(item: PolicyRow) -> int:
    return len(item.row.input_ids)


def _padded(values: Sequence[Tensor], like: Tensor) -> Tensor:
    """Right-pad (L_i,) tensors with zeros to the shape of `like` (B, L)."""
    padded = torch.zeros_like(like)
    for row, value in zip(padded, values):
        row[: len(value)] = value
    return padded
