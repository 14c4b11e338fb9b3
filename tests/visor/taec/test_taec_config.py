"""The shipped evaluation config states the defaults of the code."""

from __future__ import annotations

from pathlib import Path

import yaml

from visor.config import load_config
from visor.taec.config import TaecConfig

SHIPPED = Path(__file__).parents[3] / "configs" / "eval" / "taec.yaml"


def test_the_shipped_file_holds_every_setting_at_its_default():
    written = yaml.safe_load(SHIPPED.read_text(encoding="utf-8"))
    assert written == {"taec": True, "taec_config": TaecConfig().model_dump(mode="json")}


def test_values_can_be_overridden_by_name():
    config = load_config(TaecConfig, None, ["--admission.redundancy", "sum", "--decay.page=0.2"])
    assert (config.admission.redundancy, config.decay.page) == ("sum", 0.2)
