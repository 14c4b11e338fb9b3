"""Supervised fine-tuning.

accelerate launch --config_file configs/accelerate/….yaml sft --config configs/sft/….yaml
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rollout.model_hub import ModelHub, open_hub
from sft.arguments import SftConfig
from sft.card import card_facts
from sft.command import explained
from visor.config import parse_cli

DESCRIPTION = "Fine-tune a policy on trajectories or chat data with TRL's SFTTrainer."


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line and train."""
    config = parse_cli(SftConfig, argv, prog="sft.train", description=DESCRIPTION)
    with explained("sft.train"):
        trainer = build_trainer(config)
    run(config, trainer)


def train(config: SftConfig) -> None:
    """Build and run; the model, loadable on its own, is in `output_dir` afterwards."""
    run(config, build_trainer(config))


def run(config: SftConfig, trainer) -> None:
    """Train, going on from a checkpoint where the settings say so, and write the model."""
    output_dir = Path(config.output_dir)
    counts = trainer.data_collator.rows.counts
    trainer.accelerator.print(f"{counts.rows} rows; left out: {dict(counts.left_out) or 'none'}", flush=True)
    if trainer.is_world_process_zero():
        output_dir.mkdir(parents=True, exist_ok=True)
        (output_dir / "run_config.json").write_text(config.model_dump_json(indent=2) + "\n")
    trainer.train(resume_from_checkpoint=_checkpoint(config))
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        _write_card(config, output_dir, trainer.state, counts.rows)
        if trainer.hub:
            trainer.hub.finish()


def build_trainer(config: SftConfig):
    """Model, rows and trainer of a run, ready to `train()`. ValueError for what cannot be trained."""
    import torch

    from rollout.chats import ChatImages
    from sft.dataset import LazyRows
    from sft.trainer import RowCollator, VisorSFTTrainer, row_dataset
    from visor.models.loading import load_processor
    from visor.models.lora import load_policy
    from visor.models.precision import device_facts, with_device_defaults

    config = with_device_defaults(config, device_facts())
    if config.torch_threads:
        torch.set_num_threads(config.torch_threads)
    processor = load_processor(config.model_name_or_path)
    renderer = processor.renderer()
    images = ChatImages(_page_images(config))
    rows = LazyRows(
        config.data,
        renderer,
        images,
        context=config.context,
        max_length=config.max_length,
        budget=(config.image_min_pixels, config.image_max_pixels),
        seed=config.seed,
    )
    arguments = trainer_arguments(config)
    model = load_policy(config, device=str(arguments.device))
    hub = open_hub(config, config.output_dir, lambda: arguments.process_index == 0)
    return VisorSFTTrainer(
        model=model,
        args=arguments,
        train_dataset=row_dataset(rows),
        data_collator=RowCollator(rows, renderer, images),
        processing_class=processor.tokenizer,
        optimizers=(_optimizer(config, model), None),
        callbacks=_callbacks(config, processor, rows.counts.rows, hub),
        sort_steps=config.train_sampling_strategy == "sorted_steps",
        hub=hub,
    )


def trainer_arguments(config: SftConfig):
    """The `trl.SFTConfig` of a run."""
    import torch
    from trl import SFTConfig

    return SFTConfig(
        output_dir=config.output_dir,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        max_grad_norm=config.max_grad_norm,
        lr_scheduler_type=config.lr_scheduler_type,
        warmup_steps=config.warmup_steps,
        num_train_epochs=config.num_train_epochs,
        max_steps=config.max_steps,
        per_device_train_batch_size=config.per_device_train_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        gradient_checkpointing=bool(config.gradient_checkpointing),
        bf16=config.bf16,
        max_length=None,  # rows are cut when they are built
        train_sampling_strategy="random"
        if config.train_sampling_strategy == "sorted_steps"
        else config.train_sampling_strategy,
        length_column_name="length",
        remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        ddp_find_unused_parameters=True,  # rows without pictures leave a trained vision tower out
        dataloader_pin_memory=torch.cuda.is_available(),
        seed=config.seed,
        logging_steps=config.logging_steps,
        save_strategy=config.save_strategy,
        save_steps=config.save_steps,
        save_total_limit=config.save_total_limit,
        report_to=config.report_to,
        disable_tqdm=True,
    )


def _optimizer(config: SftConfig, model):
    """Muon where it is asked for; else None, and the Trainer makes AdamW from its arguments."""
    if config.optimizer == "adamw":
        return None
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise ValueError("optimizer: muon needs whole gradients, which DeepSpeed splits; use adamw with it")
    from sft.optimizer import MuonWithAdamW

    return MuonWithAdamW(
        model,
        muon_learning_rate=config.muon_learning_rate,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        betas=(config.adam_beta1, config.adam_beta2),
    )


def _page_images(config: SftConfig):
    """Pictures of the corpus pages, or None without a corpus."""
    if config.corpus is None:
        return None
    from data.corpus import Corpus
    from visor.env.crop import ImageCutter

    corpus = Corpus.open(config.corpus)
    corpus.check_images()
    return ImageCutter(corpus)


def _write_card(config: SftConfig, folder: Path, state, rows: int) -> None:
    """`state`: the Trainer's."""
    from rollout.model_card import write_card

    write_card(folder, card_facts(config, state.log_history, rows, state.global_step))


def _callbacks(config: SftConfig, processor, rows: int, hub: ModelHub | None) -> list:
    """Write the image processor and the card beside every saved model, so that each checkpoint loads on its
    own, and hand it to the hub; end the run at the wanted loss."""
    from transformers import TrainerCallback

    class SaveProcessor(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            if state.is_world_process_zero:
                folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
                processor.save_pretrained(folder)
                _write_card(config, folder, state, rows)
                if hub:
                    hub.saved(folder, state.global_step)

        def on_train_end(self, args, state, control, **kwargs):
            if state.is_world_process_zero:
                processor.save_pretrained(args.output_dir)

    class StopAtLoss(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if config.stop_loss is not None and (logs or {}).get("loss", float("inf")) < config.stop_loss:
                control.should_training_stop = True

    return [SaveProcessor(), StopAtLoss()]


def _checkpoint(config: SftConfig) -> str | None:
    """The checkpoint to go on from, or None to start afresh."""
    from transformers.trainer_utils import get_last_checkpoint

    if isinstance(config.resume_from_checkpoint, str):
        return config.resume_from_checkpoint
    if config.resume_from_checkpoint and Path(config.output_dir).is_dir():
        return get_last_checkpoint(config.output_dir)
    return None


if __name__ == "__main__":
    main()
