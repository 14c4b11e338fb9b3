"""Settings of a supervised fine-tuning run. Names are Transformers' and TRL's own where they have one."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rollout.model_hub import HubOptions
from visor.config import Config
from visor.models.options import ModelOptions
from visor.models.smart_resize import FACTOR


class DataSource(Config):
    path: str
    """JSON lines of trajectories, or a JSON / JSON-lines file of {messages, images}."""
    kind: Literal["trajectories", "messages"] = "trajectories"
    weight: float = Field(1.0, gt=0)
    """How many times its rows appear in an epoch; 0.5 takes a random half of them."""
    context: Literal["episode", "append"] | None = None
    """Of its trajectories' rows; None = the run's `context`. A file may be named twice, once for each."""
    train: Literal["all", "last"] = "all"
    """Of trajectories. last: loss on the last reply only, to teach how to end an episode without teaching the
    decisions that led there."""

    @model_validator(mode="after")
    def _chats_say_what_is_trained(self) -> Self:
        if self.kind == "messages" and (self.train != "all" or self.context is not None):
            raise ValueError(
                f"{self.path}: context and train are of trajectories; in chat data a message with "
                '"train": false is kept out of the loss'
            )
        return self


class SftConfig(ModelOptions, HubOptions):
    output_dir: str
    data: list[DataSource] = Field(min_length=1)
    corpus: str | None = None
    """Corpus folder whose pages the trajectories show."""
    context: Literal["episode", "append"] = "episode"
    """What a trajectory's rows look like. episode: one row a turn, with the context of that turn (evidence
    block and window included), as the agent will see it. append: one row over the whole conversation without
    either (VISOR section 3.3)."""
    image_min_pixels: int = Field(256 * FACTOR**2, ge=FACTOR**2)
    image_max_pixels: int = Field(512 * FACTOR**2, ge=FACTOR**2)
    """Width × height at which an image file of chat data is shown; pages carry their own bounds."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: torch.optim.Muon on the matrices of the blocks, AdamW on embeddings, norms and biases."""
    learning_rate: float = 1e-5
    """Of AdamW."""
    muon_learning_rate: float = 0.02
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    max_grad_norm: float = 1.0
    lr_scheduler_type: str = "cosine"
    warmup_steps: float = Field(0.1, ge=0)
    """A number of steps, or a share of all steps when below 1."""

    num_train_epochs: float = 3.0
    max_steps: int = -1
    """Optimizer steps; above 0 it wins over num_train_epochs."""
    per_device_train_batch_size: int = Field(1, ge=1)
    gradient_accumulation_steps: int = Field(1, ge=1)
    max_length: int = Field(16384, ge=1)
    """Tokens of a row. An append row is cut at a turn boundary, any other longer row is left out; both are
    counted."""
    train_sampling_strategy: Literal["sorted_steps", "group_by_length", "random", "sequential"] = (
        "sorted_steps"
    )
    """sorted_steps: random order, the rows of one optimizer step sorted by length, so that its micro-batches
    hold little padding and its gradient is that of random order. The others are Transformers' own;
    group_by_length fills whole steps with rows of one length, which here means of one kind of turn."""
    torch_threads: int | None = None
    """CPU threads of each process; None leaves PyTorch's choice."""

    logging_steps: float = 10
    stop_loss: float | None = Field(None, gt=0)
    """End the run when the mean loss of the last logging_steps is below this; max_steps stays the bound. For
    a skill that forms suddenly, at a step that differs from seed to seed."""
    save_strategy: Literal["no", "steps", "epoch"] = "steps"
    save_steps: float = 500
    save_total_limit: int | None = 2
    resume_from_checkpoint: bool | str = False
    """true: go on from the newest checkpoint in output_dir, if there is one; or the path of a checkpoint."""
    report_to: Literal["none", "wandb"] = "none"
