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
from grpo.engine_build import engine_policy, engine_type, open_engine
from grpo.launching import make_accelerator, prepare, sharding_of
from grpo.plan import check_limits, plan_engine
from grpo.planning.launch import SPLIT_WEIGHTS
from grpo.questions import load_training_questions, load_validation_questions
from grpo.resume import find_checkpoint, write_run_config
from grpo.sharding import WholePolicy, without_weights
from grpo.trackers import check_installed, start_trackers
from grpo.trainer import GrpoTrainer
from grpo.update import Collate, Lockstep, PolicyUpdate
from grpo.validation import Validation
from rewards import Reward, get_reward
from rollout.build import make_judge
from rollout.chats import ChatImages, chat_row, read_chats
from rollout.engine import RolloutEngine
from rollout.model_hub import open_hub
from rollout.rows import TrainingRow, trajectory_row, turn_rows
from visor.env.crop import ImageCutter
from visor.env.prompts import load_prompts
from visor.models.base import ImageSource, PolicyClient, Sampling
from visor.models.blank_picture import with_blank_picture
from visor.models.features import ImageFeatures, collate_with_features, same_vision
from visor.models.loading import Processor, load_model, load_processor, unwrap
from visor.models.lora import (
    ReferencePolicy,
    add_reference,
    is_adapter,
    is_peft_model,
    load_policy,
    one_base_suffices,
)
from visor.models.precision import device_facts, with_device_defaults
from visor.models.quantisation import quantisation_config
from visor.models.rendering import ChatRenderer
from visor.models.sampling_engine import SamplingEngine
from visor.models.tensors import collate, to_device
from visor.models.transformers import TransformersClient
from visor.models.vllm import VLLMClient
from visor.retrieval.index import index_path, open_index
from visor.stage_clock import CLOCK
from visor.systems.visor import VisorSystem
from visor.types import Question, Trajectory

VALIDATION_CACHE_BYTES = 1 << 27
"""Of the pages' pixels that validation keeps, beside those of training."""


def build_trainer(config: GrpoConfig) -> GrpoTrainer:
    """Everything of a run, resumed where its folder says so. ValueError for what cannot be trained."""
    config = with_device_defaults(config, device_facts())
    reward = get_reward(config.reward)
    check_installed(config.report_to)
    checkpoint = find_checkpoint(config)
    corpus = Corpus.open(config.corpus)
    corpus.check_images()
    questions = load_training_questions(config, corpus)
    held_out = _validation_data(config, corpus, questions)
    accelerator = make_accelerator(config)
    _check_frozen(config, accelerator)
    # Sampling has seeds of its own; this one is of LoRA's dropout.
    set_seed(config.seed, device_specific=True)
    hub = open_hub(config, config.output_dir, lambda: accelerator.is_main_process)
    if accelerator.is_main_process:
        write_run_config(config)
    processor = load_processor(config.model_name_or_path)
    context = check_limits(
        config, processor.tokenizer, corpus.pages(), questions, quiet=not accelerator.is_main_process
    )
    renderer = processor.renderer()
    images = ChatImages(ImageCutter(corpus))
    auxiliary = _auxiliary_rows(config, renderer, images)
    policy = _policy(config, checkpoint, accelerator.device)
    sampling_engine = None
    if config.use_vllm:
        pages_and_questions = (held_out[0].pages(), held_out[1]) if held_out else None
        limits = plan_engine(config, processor.tokenizer, context, pages_and_questions)
        sampling_engine = open_engine(config, limits, accelerator, engine_type(config, policy))
    optimizer = _optimizer(config, policy)
    scheduler = get_scheduler(
        config.lr_scheduler_type,
        optimizer,
        num_warmup_steps=config.warmup,
        num_training_steps=config.max_steps,
    )
    whole, model, optimizer = _prepared(accelerator, policy, optimizer)
    client = _client(config, whole.model, renderer, images, sampling_engine)
    features = (
        client.features if isinstance(client, TransformersClient) else ImageFeatures(policy, renderer, images)
    )
    update = _update(config, accelerator, policy, model, optimizer, features)
    validation = _validation(config, accelerator, held_out, whole.model, processor, reward, sampling_engine)
    pushed = None
    if isinstance(client, VLLMClient):
        clients = [c for c in (client, validation and validation.client) if isinstance(c, VLLMClient)]
        pushed = engine_policy(config, clients, model, accelerator, questions[0], update.collate)
    trainer = GrpoTrainer(
        config,
        accelerator=accelerator,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        update=update,
        engine=_engine(
            config, corpus, client, images, reward, index=config.index, temperature=config.temperature
        ),
        validation=validation,
        engine_policy=pushed,
        client=client,
        questions=questions,
        build_rows=row_builder(config, renderer, images),
        processor=processor,
        features=features,
        policy=whole,
        auxiliary_rows=auxiliary,
        hub=hub,
    )
    if checkpoint:
        trainer.load_state(checkpoint)
    if pushed:
        try:
            pushed.start(trainer.step_done)
        except BaseException:
            pushed.close()
            raise
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


def _check_frozen(config: GrpoConfig, accelerator: Accelerator) -> None:
    if accelerator.num_processes > 1 and "language_model" in config.freeze:
        raise ValueError(
            "freeze names language_model: rows without pictures then have no gradient, and several processes "
            "would wait for each other's; run one process, or train the language model too"
        )


def _policy(config: GrpoConfig, checkpoint: Path | None, device: torch.device | None = None):
    """The policy to train: of the checkpoint, or the one training starts from. With the reference beside it
    where the two share their base weights."""
    model = load_policy(config, checkpoint, device=None if device is None else str(device))
    start = config.model_name_or_path if is_adapter(config.model_name_or_path) else None
    if config.beta and start and one_base_suffices(start):
        add_reference(model, start)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable()
        # It makes the embeddings' outputs require gradients, which checkpointing without re-entrance does not
        # need, and which would send every backward pass through a frozen vision tower.
        unwrap(model).disable_input_require_grads()
    return model


def _prepared(accelerator: Accelerator, policy, optimizer) -> tuple[WholePolicy, Any, Any]:
    """(the whole policy, the model as it trains, its optimizer)."""
    if sharding_of(accelerator) not in SPLIT_WEIGHTS:
        return WholePolicy(policy), *prepare(accelerator, policy, optimizer)
    empty = without_weights(policy, accelerator.device)
    model, optimizer = prepare(accelerator, policy, optimizer)
    return WholePolicy(empty, trained=model), model, optimizer


def _lockstep(accelerator: Accelerator, renderer: ChatRenderer, ready_features: bool) -> Lockstep | None:
    """What processes that share gradients or weights piece by piece need; None for whole copies.
    `ready_features`: the vision tower does not run in an update."""
    sharding = sharding_of(accelerator)
    if sharding == "none":
        return None
    add_picture = _unchanged if ready_features else partial(with_blank_picture, renderer=renderer)
    return Lockstep(add_picture, splits_weights=sharding in SPLIT_WEIGHTS)


def _unchanged(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return batch


def _reference(config: GrpoConfig, policy, device: torch.device):
    """The frozen policy of the KL term, or None. Always the one training starts from, a LoRA adapter
    included; on resume it is not the checkpoint. An adapter shares the base weights of the policy."""
    if not config.beta:
        return None
    start = config.model_name_or_path if is_adapter(config.model_name_or_path) else None
    if is_peft_model(policy) and one_base_suffices(start):
        return ReferencePolicy(policy)
    reference = load_model(
        config.model_name_or_path,
        dtype=config.dtype or "auto",
        device=str(device),
        attn_implementation=config.attn_implementation,
        quantisation=quantisation_config(config),
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
    policy,
    model,
    optimizer,
    features: ImageFeatures,
) -> PolicyUpdate:
    reference = _reference(config, policy, accelerator.device)
    shared = _shares_features(accelerator, features, reference)
    return PolicyUpdate(
        accelerator,
        model,
        optimizer,
        _collate(accelerator.device, features, shared),
        config.loss,
        reference=reference,
        micro_batch_size=config.per_device_train_batch_size,
        max_tokens_per_micro_batch=config.max_tokens_per_micro_batch,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        num_iterations=config.num_iterations,
        max_grad_norm=config.max_grad_norm,
        exact_context=config.credit == "turn",
        max_logprob_gap=config.max_logprob_gap,
        auxiliary_weight=config.auxiliary.weight if config.auxiliary else 0.0,
        pad_id=features.renderer.pad_id,
        lockstep=_lockstep(accelerator, features.renderer, ready_features=shared),
    )


def _shares_features(accelerator: Accelerator, features: ImageFeatures, reference) -> bool:
    """Whether the features that the replies were sampled under serve the update too, all its rows and passes,
    the reference's included: the vision tower is frozen, and every process has all of it."""
    if sharding_of(accelerator) in SPLIT_WEIGHTS or not features.frozen:
        return False
    # A checkpoint that was trained with its vision tower may go on without: its reference is another model.
    return reference is None or same_vision(features.model, reference)


def _collate(device: torch.device, features: ImageFeatures, shared: bool) -> Collate:
    """Rows → batches; with image features in place of pixels where those are shared."""

    def with_pixels(rows: Sequence[TrainingRow]) -> dict[str, torch.Tensor]:
        CLOCK.progress(_named(rows))
        return to_device(collate(rows, features.renderer, features.images), device)

    def with_features(rows: Sequence[TrainingRow]) -> dict[str, torch.Tensor]:
        CLOCK.progress(_named(rows))
        return collate_with_features(rows, features, device)

    return with_features if shared else with_pixels


def _named(rows: Sequence[TrainingRow]) -> str:
    """Each micro-batch passes through its collation, so a long update shows progress there."""
    return f"{len(rows)} rows, the first of {rows[0].trajectory or 'padding'}"


def _client(
    config: GrpoConfig, model, renderer: ChatRenderer, images: ImageSource, engine: SamplingEngine | None
) -> TransformersClient | VLLMClient:
    """Samples from the very weights that are trained, or from the engine that is given them."""
    if engine is not None:
        return VLLMClient(engine, renderer, images, name=Path(config.model_name_or_path).name)
    prompt = config.max_prompt_length
    return TransformersClient(
        model,
        renderer,
        images,
        max_context=None if prompt is None else prompt + config.max_completion_length,
        batch_size=config.rollout_batch_size,
        name=Path(config.model_name_or_path).name,
        bf16=bool(config.bf16),
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
    sampling_engine: SamplingEngine | None,
) -> Validation | None:
    """A client of its own, so that no page of another corpus is taken for one of training."""
    if data is None:
        return None
    corpus, questions = data
    images = ImageCutter(corpus)
    renderer = processor.renderer(cache_bytes=VALIDATION_CACHE_BYTES)
    client = _client(config, policy, renderer, images, sampling_engine)
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
