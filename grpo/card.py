"""The model card of a GRPO run's folders."""

from __future__ import annotations

from pathlib import Path

from grpo.arguments import GrpoConfig
from grpo.figures import FIGURES, pass_figures
from grpo.records import METRICS, VALIDATION_METRICS, read_rows
from rollout.model_card import CardFacts

SETTINGS = (
    "max_steps", "questions_per_step", "num_generations", "credit", "reward", "loss_type", "beta", "epsilon",
    "epsilon_high", "scale_rewards", "importance_sampling_level", "learning_rate", "lr_scheduler_type",
    "warmup_steps", "weight_decay", "max_grad_norm", "num_iterations", "gradient_accumulation_steps",
    "temperature", "max_completion_length", "max_length", "freeze", "use_peft", "lora_r", "lora_alpha",
    "lora_dropout", "load_in_4bit", "load_in_8bit", "dtype", "bf16", "seed",
)  # fmt: skip


def card_facts(config: GrpoConfig, step: int, validation: dict | None = None) -> CardFacts:
    """Of the model after `step`. `validation`: the line of its validation, where it is not recorded yet."""
    output_dir = Path(config.output_dir)
    lines = read_rows(output_dir / VALIDATION_METRICS)
    validation = validation or next((line for line in lines if line["step"] == step), None)
    trained = [line for line in read_rows(output_dir / METRICS) if line["step"] <= step]
    measured, on = {}, ""
    if validation is not None:
        measured, on = (
            validation,
            f"{validation['n']} episodes on the validation questions, after step {step}.",
        )
    elif trained:
        measured, on = trained[-1], f"Of the episodes sampled in training step {trained[-1]['step']}."
    names = [*FIGURES, *pass_figures(config.eval_num_samples)]
    datasets = {
        "training questions": [config.questions.partition(":")[2]],
        "corpus": [config.corpus],
        "validation questions": [config.eval_questions.partition(":")[2]] if config.eval_questions else [],
        "validation corpus": [config.eval_corpus] if config.eval_corpus else [],
    }
    window = config.episode.window
    settings = {name: getattr(config, name) for name in SETTINGS}
    settings |= {"window (turns kept)": window, "max_turns": config.episode.max_turns, "steps done": step}
    return CardFacts(
        name=config.hub_model_id or output_dir.absolute().name,
        method="A visual retrieval agent trained with GRPO on whole episodes",
        start=config.model_name_or_path,
        tags=["grpo"],
        datasets=datasets,
        figures={name: measured[name] for name in names if name in measured},
        figures_of=on,
        settings=settings,
    )
