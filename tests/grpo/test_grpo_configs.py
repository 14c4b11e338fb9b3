from pathlib import Path

import pytest

from grpo.arguments import GrpoConfig
from visor.config import load_config

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("grpo/*.yaml")), ids=lambda path: path.name)
def test_every_file_is_a_valid_configuration(path):
    load_config(GrpoConfig, path)


def test_the_papers_table_6():
    config = load_config(GrpoConfig, CONFIGS / "grpo" / "qwen2_5_vl_7b.yaml")
    assert (config.num_generations, config.questions_per_step, config.episode.max_turns) == (5, 8, 10)
    assert (config.max_prompt_length, config.max_completion_length, config.max_steps) == (8192, 2048, 100)
    assert (config.learning_rate, config.beta, config.warmup) == (1e-6, 0.01, 28)
    assert config.episode.window == 2


def test_warmup_as_a_number_or_a_share():
    base = {"model_name_or_path": "m", "output_dir": "o", "corpus": "c", "questions": "q", "max_steps": 40}
    assert [GrpoConfig(**base, warmup_steps=w).warmup for w in (0, 0.25, 1, 7)] == [0, 10, 1, 7]


def test_dr_grpo_divides_by_the_whole_trajectory_limit():
    base = {"model_name_or_path": "m", "output_dir": "o", "corpus": "c", "questions": "q"}
    assert GrpoConfig(**base, max_completion_length=100).loss.max_completion_length == 1000


def test_loss_options_have_trls_names_and_values():
    from trl import GRPOConfig

    base = {"model_name_or_path": "m", "output_dir": "o", "corpus": "c", "questions": "q"}
    options = {
        "loss_type": "bnpo", "importance_sampling_level": "sequence", "epsilon": 0.2, "epsilon_high": 0.28,
        "delta": 1.5, "beta": 0.04, "scale_rewards": "batch", "mask_truncated_completions": True,
        "use_bias_correction_kl": False, "num_generations": 8, "num_iterations": 2,
    }  # fmt: skip
    theirs = GRPOConfig(output_dir="o", use_cpu=True, bf16=False, **options)
    ours = GrpoConfig(**base, **options)
    for name in options:
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in ("epsilon", "epsilon_high", "delta", "beta", "importance_sampling_level", "loss_type"):
        assert getattr(ours.loss, name) == options[name]
    assert GrpoConfig(**base, scale_rewards=False).scale_rewards == "none"
    assert GrpoConfig(**base, scale_rewards=True).scale_rewards == "group"
    with pytest.raises(ValueError, match="delta"):
        GrpoConfig(**base, delta=1.0)
