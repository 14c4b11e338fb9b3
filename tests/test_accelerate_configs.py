"""The launch files are ones that `accelerate launch` reads."""

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

FILES = sorted((Path(__file__).parents[1] / "configs" / "accelerate").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_accelerate_reads_it(path):
    config = load_config_from_file(str(path))
    assert config.num_processes in (2, 8)
    assert config.num_machines == 1
    if path.stem.startswith("zero"):
        assert config.deepspeed_config["zero_stage"] == int(path.stem[-1])


def test_there_are_launch_files():
    assert [path.stem for path in FILES] == ["cpu2", "gpu8", "zero2"]
