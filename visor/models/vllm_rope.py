"""What vLLM must be told of a checkpoint's M-RoPE to compute what Transformers computes."""

from __future__ import annotations

import json
import sys
from typing import Any

AXES = 3


def rope_overrides(config: Any) -> dict[str, Any]:
    """vLLM's `hf_overrides` for a `Qwen2_5_VLConfig`; empty where both read the config alike.

    Transformers lets the sections of `mrope_section` take turns over time, height and width, however many
    there are; vLLM takes three, one an axis, or `mrope_interleaved`, where the axes take turns frequency by
    frequency. Sections of width 1 are the latter. ValueError for sections that vLLM has no word for.
    """
    parameters = dict(config.text_config.rope_parameters or {})
    sections = parameters.get("mrope_section", ())
    if len(sections) <= AXES or parameters.get("mrope_interleaved"):
        return {}
    if set(sections) != {1}:
        raise ValueError(f"vLLM cannot compute the M-RoPE sections {sections}; it takes three, or all of 1")
    parameters["mrope_section"] = [len(sections[axis::AXES]) for axis in range(AXES)]
    parameters["mrope_interleaved"] = True
    return {"text_config": {"rope_parameters": parameters}}


def main() -> None:
    """Print the overrides of the checkpoint argv[1] as JSON, for `--hf-overrides` of `vllm serve`."""
    from visor.models.loading import load_config

    print(json.dumps(rope_overrides(load_config(sys.argv[1]))))


if __name__ == "__main__":
    main()
