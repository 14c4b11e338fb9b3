"""Configuration → trainer: the policy, its reference, the environment and the update, put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import get_scheduler

from data.corpus import Corpus
from grpo.arguments import GrpoConfig
from grpo.launching import make_accelerator, prepare, sharding_of
from grpo.plan import check_limits
from grpo.planning.launch import SPLIT_WEIGHTS
from grpo.questions import load_training_questions, load_validation_questions
from grpo.resume import find_checkpoint, write_run_config
from grpo.sharding import WholePolicy, without_weights
from grpo.trackers import check_installed, start_trackers
from grpo.trainer import GrpoTrainer
from grpo.update import Lockstep, PolicyUpdate
from grpo.validation import Validation
from rewards import Reward, get_reward
from rollout.build import make_judge
from rollout.chats import ChatImages, chat_row, read_chats
from rollout.engine import RolloutEngine
from rollout.rows import TrainingRow, trajectory_row, turn_rows
from visor.env.crop import ImageCutter
from visor.env.prompts import load_prompts
from visor.models.base import ImageSource, PolicyClient, Sampling
from visor.models.blank_picture import with_blank_picture
from visor.models.loading import Processor, load_model, load_processor
from visor.models.lora import add_lora
from visor.models.rendering import ChatRenderer
from visor.models.tensors import collate, to_device
from visor.models.transformers import TransformersClient
from visor.retrieval.index import index_path, open_index
from visor.systems.visor import VisorSystem
from visor.types import Question, Trajectory

VALIDATION_CACHE_BYTES = 1 << 27
"""Of the pages' pixels that validation keeps, beside those of training."""


def build_trainer(config: GrpoConfig) -> GrpoTrainer:
    """Everything of a run, resumed where its folder says so. ValueError for what cannot be trained."""
    reward = get_reward(config.reward)
    check_installed(config.report_to)
    checkpoint = find_checkpoint(config)
    corpus = Corpus.open(config.corpus)
    corpus.check_images()
    questions = load_training_questions(config, corpus)
    held_out = _validation_data(config, corpus, questions)
    accelerator = make_accelerator(config)
    # Sampling has seeds of its own; this one is of LoRA's dropout.
    set_seed(config.seed, device_specific=True)
    if accelerator.is_main_process:
        write_run_config(config)
    processor = load_processor(config.model_name_or_path)
    check_limits(
        config, processor.tokenizer, corpus.pages(), questions, quiet=not accelerator.is_main_process
    )
    renderer = processor.renderer()
    images = ChatImages(ImageCutter(corpus))
    auxiliary = _auxiliary_rows(config, renderer, images)
    policy = _policy(config, checkpoint)
    optimizer = _optimizer(config, policy)
    scheduler = get_scheduler(
        config.lr_scheduler_type,
        optimizer,
        num_warmup_steps=config.warmup,
        num_training_steps=config.max_steps,
    )
    whole, model, optimizer = _prepared(accelerator, policy, optimizer)
    client = _client(config, whole.model, renderer, images)
    trainer = GrpoTrainer(
        config,
        accelerator=accelerator,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        update=_update(config, accelerator, model, optimizer, renderer, images),
        engine=_engine(
            config, corpus, client, images, reward, index=config.index, temperature=config.temperature
        ),
        validation=_validation(config, accelerator, held_out, whole.model, processor, reward),
        client=client,
        questions=questions,
        build_rows=row_builder(config, renderer, images),
        processor=processor,
        policy=whole,
        auxiliary_rows=auxiliary,
    )
    if checkpoint:
        trainer.load_state(checkpoint)
    settings = config.model_dump(mode="json")
    start_trackers(accelerator, config.report_to, settings, Path(config.output_dir), step=trainer.step_done)
    return trainer


def row_builder(
    config: GrpoConfig, renderer: ChatRenderer, images: ImageSource
) -> Callable[[Trajectory], list[TrainingRow]]:
    """The rows of a trajectory under the credit mode. A trajectory row is cut to `max_length`, or raises
    RowTooLong; turn rows have any length (`rows_of_groups` leaves the long ones out)."""

    def whole(trajectory: Trajectory) -> list[TrainingRow]:
        if not trajectory.turns:
            return []
        return [trajectory_row(trajectory, renderer, images, config.max_length)]

    def turns(trajectory: Trajectory) -> list[TrainingRow]:
        return turn_rows(trajectory, renderer, images)

    return whole if config.credit == "trajectory" else turns


# ---------------------------------------------------------------- parts


def _policy(config: GrpoConfig, checkpoint: Path | None):
    """The policy to train: of the checkpoint, or the one training starts from."""
    model = load_model(
        checkpoint or config.model_name_or_path,
        dtype=config.dtype,
        attn_implementation=config.attn_implementation,
        freeze=config.freeze,
    )
    if config.use_peft and not hasattr(model, "peft_config"):
        model = add_lora(
            model, rank=config.lora_r, alpha=config.lora_alpha, dropout=config.lora_dropout, seed=config.seed
        )
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    return model


def _prepared(accelerator: Accelerator, policy, optimizer) -> tuple[WholePolicy, Any, Any]:
    """(the whole policy, the model as it trains, its optimizer)."""
    if sharding_of(accelerator) not in SPLIT_WEIGHTS:
        return WholePolicy(policy), *prepare(accelerator, policy, optimizer)
    empty = without_weights(policy, accelerator.device)
    model, optimizer = prepare(accelerator, policy, optimizer)
    return WholePolicy(empty, trained=model), model, optimizer


def _lockstep(accelerator: Accelerator, renderer: ChatRenderer) -> Lockstep | None:
    """What processes that share gradients or weights piece by piece need; None for whole copies."""
    sharding = sharding_of(accelerator)
    if sharding == "none":
        return None
    return Lockstep(partial(with_blank_picture, renderer=renderer), splits_weights=sharding in SPLIT_WEIGHTS)


def _reference(config: GrpoConfig, device: torch.device):
    """The frozen policy of the KL term, or None. Always the one training starts from, a LoRA adapter
    included; on resume it is not the checkpoint."""
    if not config.beta:
        return None
    reference = load_model(
        config.model_name_or_path,
        dtype=config.dtype,
        device=str(device),
        attn_implementation=config.attn_implementation,
    )
    return reference.requires_grad_(False)


def _optimizer(config: GrpoConfig, model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.weight_decay,
        fused=True,
    )


def _update(
    config: GrpoConfig,
    accelerator: Accelerator,
    model,
    optimizer,
    renderer: ChatRenderer,
    images: ImageSource,
) -> PolicyUpdate:
    return PolicyUpdate(
        accelerator,
        model,
        optimizer,
        lambda rows: to_device(collate(rows, renderer, images), accelerator.device),
        config.loss,
        reference=_reference(config, accelerator.device),
        micro_batch_size=config.per_device_train_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        num_iterations=config.num_iterations,
        max_grad_norm=config.max_grad_norm,
        exact_context=config.credit == "turn",
        max_logprob_gap=config.max_logprob_gap,
        auxiliary_weight=config.auxiliary.weight if config.auxiliary else 0.0,
        pad_id=renderer.pad_id,
        lockstep=_lockstep(accelerator, renderer),
    )


def _client(config: GrpoConfig, model, renderer: ChatRenderer, images: ImageSource) -> TransformersClient:
    """Samples from the very weights that are trained."""
    prompt = config.max_prompt_length
    return TransformersClient(
        model,
        renderer,
        images,
        max_context=None if prompt is None else prompt + config.max_completion_length,
        batch_size=config.rollout_batch_size,
        name=Path(config.model_name_or_path).name,
    )


def _engine(
    config: GrpoConfig,
    corpus: Corpus,
    client: PolicyClient,
    images: ImageSource,
    reward: Reward,
    *,
    index: str | None,
    temperature: float,
) -> RolloutEngine:
    sampling = Sampling(temperature, config.top_p, config.max_completion_length)
    path = index_path(corpus.path, index, config.retriever)
    retriever = open_index(path, corpus, config.retriever)
    prompts = load_prompts(config.episode.prompts)
    system = VisorSystem(client, retriever, corpus, config.episode, prompts, sampling)
    judge = make_judge(config.judge, images, config.judge_options)
    return RolloutEngine(system, judge, reward, config.max_concurrency)


def _validation_data(
    config: GrpoConfig, corpus: Corpus, training: Sequence[Question]
) -> tuple[Corpus, list[Question]] | None:
    """The corpus and the questions of validation; None without it."""
    if config.eval_steps is None:
        return None
    held_out = Corpus.open(config.eval_corpus) if config.eval_corpus else corpus
    held_out.check_images()
    return held_out, load_validation_questions(config, held_out, training)


def _validation(
    config: GrpoConfig,
    accelerator: Accelerator,
    data: tuple[Corpus, list[Question]] | None,
    policy,
    processor: Processor,
    reward: Reward,
) -> Validation | None:
    """A client of its own, so that no page of another corpus is taken for one of training."""
    if data is None:
        return None
    corpus, questions = data
    images = ImageCutter(corpus)
    client = _client(config, policy, processor.renderer(cache_bytes=VALIDATION_CACHE_BYTES), images)
    temperature = config.temperature if config.eval_temperature is None else config.eval_temperature
    index = config.eval_index or (None if config.eval_corpus else config.index)
    engine = _engine(config, corpus, client, images, reward, index=index, temperature=temperature)
    return Validation(
        engine,
        client,
        questions,
        accelerator=accelerator,
        output_dir=Path(config.output_dir),
        seed=config.seed,
        num_samples=config.eval_num_samples,
    )


def _auxiliary_rows(config: GrpoConfig, renderer: ChatRenderer, images: ImageSource) -> list[TrainingRow]:
    if config.auxiliary is None:
        return []
    budget = (config.episode.page_min_pixels, config.episode.page_max_pixels)
    chats = read_chats(config.auxiliary.path, budget)
    return [chat_row(chat, renderer, images, config.max_length) for chat in chats]
