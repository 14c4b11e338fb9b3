"""The model card of an SFT run's folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollout.model_card import CardFacts
from sft.arguments import SftConfig

SETTINGS = (
    "context", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps",
    "optimizer", "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm",
    "max_length", "freeze", "use_peft", "lora_r", "lora_alpha", "lora_dropout", "load_in_4bit",
    "load_in_8bit", "dtype", "bf16", "seed",
)  # fmt: skip


def card_facts(config: SftConfig, log: Sequence[dict], rows: int, step: int) -> CardFacts:
    """Of the model after `step`. `log`: the Trainer's history; `rows`: training rows of an epoch."""
    losses = [entry for entry in log if "loss" in entry]
    figures = {"training loss": losses[-1]["loss"]} if losses else {}
    settings = {name: getattr(config, name) for name in SETTINGS}
    settings |= {"training rows": rows, "steps done": step}
    return CardFacts(
        name=config.hub_model_id or Path(config.output_dir).absolute().name,
        method="A visual retrieval agent trained with supervised fine-tuning",
        start=config.model_name_or_path,
        tags=["sft", "trl"],
        datasets={
            "training data": [source.path for source in config.data],
            "corpus": [config.corpus] if config.corpus else [],
        },
        figures=figures,
        figures_of=f"Mean loss a trained token, last logged at step {losses[-1]['step']}." if losses else "",
        settings=settings,
    )
