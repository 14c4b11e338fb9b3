"""A tiny random Qwen2.5-VL on disk, shared by the tests of this folder."""

import json
from pathlib import Path

import pytest
from models_support import TEXTS

from visor.models.loading import load_model, load_processor
from visor.models.tiny import build_tiny_policy


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    build_tiny_policy(
        path,
        TEXTS,
        seed=3,
        vocab_size=400,
        text={"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
              "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3]}},
        vision={"depth": 1, "hidden_size": 32, "intermediate_size": 64, "fullatt_block_indexes": [0]},
    )  # fmt: skip
    return path


@pytest.fixture(scope="session")
def processor(tiny_path):
    return load_processor(tiny_path)


@pytest.fixture(scope="session")
def renderer(processor):
    return processor.renderer()


@pytest.fixture(scope="session")
def model(tiny_path):
    """Shared: a test that changes it loads its own."""
    return load_model(tiny_path, dtype="float32")


@pytest.fixture(scope="session")
def cases():
    """Reads a file of the shared cases; skips where the folder is absent."""
    folder = Path(__file__).parents[3].parent / "shared" / "cases" / "files"

    def read(name: str):
        if not folder.is_dir():
            pytest.skip("the shared cases are not beside this checkout")
        return json.loads((folder / name).read_text(encoding="utf-8"))

    return read
