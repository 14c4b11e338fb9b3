from pathlib import Path

import pytest
from training_world import write_world


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_world(folder)
    return folder
