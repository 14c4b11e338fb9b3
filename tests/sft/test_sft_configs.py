from pathlib import Path

import pytest

from sft.arguments import SftConfig
from visor.config import load_config

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("sft/*.yaml")), ids=lambda path: path.name)
def test_every_file_is_a_valid_configuration(path):
    load_config(SftConfig, path)


def test_the_papers_table_5():
    config = load_config(SftConfig, CONFIGS / "sft" / "qwen2_5_vl_7b.yaml")
    assert config.freeze == ["vision_tower", "projector"]
    assert config.max_length == 16384
    assert config.num_train_epochs == 3
    assert 8 * config.per_device_train_batch_size * config.gradient_accumulation_steps == 16
    assert config.gradient_accumulation_steps == 2
    assert (config.learning_rate, config.lr_scheduler_type, config.warmup_steps) == (1e-5, "cosine", 0.1)
