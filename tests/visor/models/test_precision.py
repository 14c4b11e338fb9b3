"""Precision, attention and gradient checkpointing that the settings leave open, for absent devices too."""

import json

import pytest

from visor.models.options import ModelOptions
from visor.models.precision import DeviceFacts, device_facts, with_device_defaults

CUDA = DeviceFacts("cuda", bf16=True)
FLASH = DeviceFacts("cuda", bf16=True, flash_attention=True)
LORA = {"use_peft": True}


def chosen(facts: DeviceFacts, **options) -> tuple:
    found = with_device_defaults(ModelOptions(model_name_or_path="m", **options), facts)
    return found.dtype, found.bf16, found.attn_implementation, found.gradient_checkpointing


@pytest.mark.parametrize(
    ("facts", "options", "expected"),
    [
        (DeviceFacts("cpu", flash_attention=True), {}, ("float32", False, None, False)),
        (DeviceFacts("cpu"), LORA, ("float32", False, None, False)),
        (DeviceFacts("mps"), LORA, ("float32", False, None, True)),
        (DeviceFacts("cuda"), LORA, ("float32", False, None, True)),  # before Ampere
        (CUDA, {}, ("float32", True, None, True)),
        (CUDA, LORA, ("bfloat16", True, None, True)),
        (FLASH, LORA, ("bfloat16", True, "flash_attention_2", True)),
        # It computes in 16 bits only, and rollouts read float32 weights as they are.
        (FLASH, {}, ("float32", True, None, True)),
        # DeepSpeed.
        (DeviceFacts("cuda", True, True, True), {}, ("bfloat16", True, "flash_attention_2", True)),
    ],
)  # fmt: skip
def test_the_documented_table(facts, options, expected):
    assert chosen(facts, **options) == expected


def test_what_is_set_stays():
    mine = {"dtype": "auto", "bf16": False, "attn_implementation": "eager", "gradient_checkpointing": False}
    assert chosen(FLASH, **LORA, **mine) == ("auto", False, "eager", False)
    assert chosen(DeviceFacts("cpu"), bf16=True)[:2] == ("float32", True)
    assert chosen(CUDA, bf16=False, **LORA)[0] == "float32"


def test_a_start_from_an_adapter_counts_as_lora(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "m"}))
    options = ModelOptions(model_name_or_path=str(tmp_path))
    assert with_device_defaults(options, CUDA).dtype == "bfloat16"


def test_the_facts_of_this_process(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    facts = device_facts()
    assert (facts.kind, facts.bf16, facts.master_weights) == ("cpu", False, True)


def test_settings_that_contradict_each_other():
    with pytest.raises(ValueError, match="freeze names language_model: nothing would train"):
        ModelOptions(model_name_or_path="m", use_peft=True, freeze=["language_model"])
    with pytest.raises(ValueError, match="exclude each other"):
        ModelOptions(model_name_or_path="m", load_in_4bit=True, load_in_8bit=True)
