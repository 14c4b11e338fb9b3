"""The launch files are ones that `accelerate launch` reads."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_accelerate_reads_it(path):
    config = load_config_from_file(str(path))
    assert config.num_machines == 1
    assert config.num_processes == (2 if path.stem.startswith("cpu2") else 8)
    if "zero" in path.stem:
        assert config.deepspeed_config["zero_stage"] == int(path.stem[-1])
    if "fsdp" in path.stem:
        assert config.fsdp_config["fsdp_version"] == 2


def test_there_are_launch_files():
    names = ["cpu2", "cpu2_fsdp", "cpu2_zero2", "cpu2_zero3", "fsdp", "gpu8", "zero2", "zero3"]
    assert [path.stem for path in FILES] == names


def test_documented_launches_name_a_launch_file():
    """Without one, accelerate warns of every value that it had to choose itself."""
    texts = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "configs").rglob("*.yaml")]
    texts += [ROOT / "sft" / "train.py"]
    launches = [
        line
        for path in texts
        for line in re.findall(r"accelerate launch .*", path.read_text(encoding="utf-8"))
    ]
    assert len(launches) >= 4
    assert [line for line in launches if "--config_file configs/accelerate/" not in line] == []


def test_a_launch_with_a_file_is_quiet():
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file"]
    free = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [*command, str(ROOT / "configs" / "accelerate" / "cpu2.yaml"), "sft", "--help"],
        cwd=ROOT, env=free, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "defaults used instead" not in done.stderr
