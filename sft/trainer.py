"""TRL's SFTTrainer over this project's rows: same collator and log-probabilities as GRPO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import is_peft_model
from datasets import Dataset
from trl import SFTTrainer

from rollout.model_hub import ModelHub
from sft.dataset import LazyRows
from sft.sampler import SortedStepsSampler
from visor.models.base import ImageSource
from visor.models.loading import load_model
from visor.models.rendering import ChatRenderer
from visor.models.tensors import collate, forward_logprobs

ROW_COLUMN = "row"
"""Index of the row. Pictures travel inside the rows, so no column is named `images`, which would make the
trainer take the data for its own image format."""
LENGTH_COLUMN = "length"


def row_dataset(rows: LazyRows) -> Dataset:
    """The dataset a Trainer samples from: (index, estimated length) a row."""
    return Dataset.from_dict({ROW_COLUMN: list(range(len(rows))), LENGTH_COLUMN: rows.lengths})


class RowCollator:
    """[{row: index}, …] → a padded batch."""

    def __init__(self, rows: LazyRows, renderer: ChatRenderer, images: ImageSource) -> None:
        self.rows = rows
        self.renderer = renderer
        self.images = images

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return collate([self.rows[feature[ROW_COLUMN]] for feature in features], self.renderer, self.images)


class VisorSFTTrainer(SFTTrainer):
    """SFTTrainer with the loss over masked tokens only.

    On a CPU TRL's own `compute_loss` runs the output layer, entropy and accuracy at every position of the
    batch, the untrained ones included.
    """

    def __init__(self, *args, sort_steps: bool = False, hub: ModelHub | None = None, **kwargs) -> None:
        """`sort_steps`: take the order of the rows from `SortedStepsSampler`. `hub`: where models go."""
        model = kwargs["model"]
        trained = {parameter: parameter.data for parameter in model.parameters() if parameter.requires_grad}
        super().__init__(*args, **kwargs)
        # TRL rounds the adapter of a quantised model to bfloat16, in which small steps are lost.
        for parameter, values in trained.items():
            parameter.data = values
        self.sort_steps = sort_steps
        self.hub = hub
        # Qwen2.5-VL says that its own loss takes no token count, so Trainer would hand none to `compute_loss`
        # and average the means of micro-batches and processes, whatever their numbers of tokens.
        self.model_accepts_loss_kwargs = True

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Token mean of −log p over the trained tokens of the whole optimizer step.

        `num_items_in_batch` is their number over all micro-batches and processes.
        """
        assert not return_outputs, "the loss has no outputs to return"
        logprobs = forward_logprobs(model, inputs)
        if model.training and not logprobs.requires_grad:
            # Rows without pictures have no gradient where the language model is frozen; Trainer wants one.
            trained = next(parameter for parameter in model.parameters() if parameter.requires_grad)
            logprobs = logprobs + 0.0 * trained.sum()
        if num_items_in_batch is None:
            return -logprobs.sum() / inputs["loss_mask"].sum().clamp(min=1)
        scale = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        return -logprobs.sum() / torch.as_tensor(num_items_in_batch).clamp(min=1) * scale

    def _get_train_sampler(self, train_dataset=None):
        if not self.sort_steps:
            return super()._get_train_sampler(train_dataset)
        rows = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        dataset: Any = self.train_dataset
        return SortedStepsSampler(dataset[LENGTH_COLUMN], rows, self.args.seed)

    def create_model_card(self, *args, **kwargs) -> None:
        """None is written: the run's settings are in `run_config.json`."""

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        # The checkpoint stores this model's weights under the names of its published files. Trainer compares
        # them with the module's own names, warns that all are missing, and goes on from the initial weights.
        model = self.model if model is None else model
        if is_peft_model(model) or self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            model.load_state_dict(load_model(resume_from_checkpoint).state_dict())

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """The evaluation loss; there are no logits to return."""
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, self._prepare_inputs(inputs)).detach(), None, None
