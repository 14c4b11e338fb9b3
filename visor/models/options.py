"""Settings of the model that trains, the same in SFT and GRPO. Names are Transformers' and TRL's own."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from visor.config import Config


class ModelOptions(Config):
    model_name_or_path: str
    """Folder of the model to start from, tokenizer and image processor included, or a LoRA adapter's."""
    freeze: list[str] = []
    """Parts that are not trained: vision_tower, projector, language_model."""
    use_peft: bool = False
    """Train a LoRA adapter on the language model instead of the weights. A run that starts from an adapter
    trains that one in any case."""
    lora_r: int = Field(16, ge=1)
    lora_alpha: int = Field(32, ge=1)
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    load_in_4bit: bool = False
    """Hold the language model's linear weights in 4 bits below the adapter (QLoRA), through bitsandbytes."""
    load_in_8bit: bool = False
    """The same in 8 bits."""
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    use_bnb_nested_quant: bool = False
    """Quantise the scales of the 4-bit weights as well."""
    dtype: Literal["float32", "bfloat16", "auto"] | None = None
    """Of the weights; auto: as stored; null: what suits the device, see docs/training.md."""
    bf16: bool | None = None
    """Compute in bfloat16 over float32 weights, or over the sharded ones of DeepSpeed; null: where the device
    does it well."""
    attn_implementation: str | None = None
    """sdpa, flash_attention_2 or eager; null: flash_attention_2 on a CUDA device that has it and weights in
    bfloat16, else Transformers' choice, which is sdpa."""
    gradient_checkpointing: bool | None = None
    """Compute the layers again in the backward pass instead of keeping what they computed; null: on GPUs."""
    seed: int = 42

    @model_validator(mode="after")
    def _quantised_weights_stay(self) -> Self:
        if self.load_in_4bit and self.load_in_8bit:
            raise ValueError("load_in_4bit and load_in_8bit exclude each other")
        return self

    @model_validator(mode="after")
    def _something_trains(self) -> Self:
        if {"vision_tower", "projector", "language_model"} <= set(self.freeze):
            raise ValueError("freeze names every part of the model, so nothing would train; leave one out")
        return self

    @model_validator(mode="after")
    def _the_adapter_is_not_frozen(self) -> Self:
        if self.use_peft and "language_model" in self.freeze:
            raise ValueError(
                "use_peft trains an adapter of the language model, and freeze names language_model: nothing "
                "would train; leave one of them out (below an adapter all weights are frozen anyway)"
            )
        return self
