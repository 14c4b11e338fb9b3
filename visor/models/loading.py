"""Checkpoints → models and processors, and one way to name a model: `hf:`, `vllm:`, `openai:`, `script:`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from visor.models.base import ImageSource, PolicyClient
from visor.models.hub import check_reachable, is_hub_name
from visor.models.rendering import ChatRenderer
from visor.models.sampling_engine import SamplingEngine
from visor.types import ImageRef

if TYPE_CHECKING:
    from PIL.Image import Image

MODEL_PARTS = ("vision_tower", "projector", "language_model")
"""Parts that can be frozen, under the names of VISOR's table 5."""

SPEC_FORMS = "hf:PATH, vllm:PATH, vllm:PATH@URL, openai:NAME@URL or script:FILE"


@dataclass
class Processor:
    """What turns messages into model inputs; needs no torchvision, unlike `Qwen2_5_VLProcessor`."""

    tokenizer: Any
    image_processor: Any

    def renderer(self, **kwargs) -> ChatRenderer:
        return ChatRenderer(self.tokenizer, self.image_processor, **kwargs)

    def save_pretrained(self, path: str | Path) -> None:
        """Write the files beside a checkpoint's weights, so that the folder loads on its own."""
        self.tokenizer.save_pretrained(path)
        self.image_processor.save_pretrained(path)


def load_processor(path: str | Path) -> Processor:
    """Tokenizer and image processor of a Qwen2.5-VL checkpoint.

    ValueError, saying which file is missing, when the folder has no tokenizer or image processor.
    """
    from transformers import AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    _check_path(path)
    tokenizer = _load(path, "tokenizer (tokenizer.json)", lambda: AutoTokenizer.from_pretrained(path))
    image_processor = _load(
        path,
        "image processor (preprocessor_config.json)",
        lambda: Qwen2VLImageProcessorPil.from_pretrained(path),
    )
    return Processor(tokenizer, image_processor)


def load_config(path: str | Path):
    """The `Qwen2_5_VLConfig` of a checkpoint. ValueError when the path holds no such model."""
    from transformers import AutoConfig

    _check_path(path)
    _check_model_type(Path(path))
    return _load(path, "model configuration (config.json)", lambda: AutoConfig.from_pretrained(path))


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str | None = None,
    attn_implementation: str | None = None,
    freeze: Iterable[str] = (),
    quantisation: Any = None,
):
    """Load a `Qwen2_5_VLForConditionalGeneration`, in eval mode.

    `dtype` is "auto" (as stored), "float32" or "bfloat16"; `freeze` names parts of `MODEL_PARTS`;
    `quantisation` is the `BitsAndBytesConfig` to load the weights with. A folder that holds a LoRA adapter
    loads its base model with the adapter, trainable, on top. ValueError when the path holds no such model.
    """
    from transformers import Qwen2_5_VLForConditionalGeneration

    _check_path(path)
    if (Path(path) / "adapter_config.json").is_file():
        from visor.models.lora import load_adapter

        return load_adapter(
            path,
            dtype=dtype,
            device=device,
            attn_implementation=attn_implementation,
            freeze=freeze,
            quantisation=quantisation,
        )
    _check_model_type(Path(path))
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn_implementation}
    if quantisation is not None:
        # Weights are quantised on the device that reads them, and 8-bit ones cannot be moved afterwards.
        options |= {"quantization_config": quantisation, "device_map": {"": device or "cpu"}}
    model = _load(
        path,
        "model (config.json and *.safetensors)",
        lambda: Qwen2_5_VLForConditionalGeneration.from_pretrained(path, **options),
    )
    if quantisation is not None:
        from visor.models.quantisation import keep_trainable_on_cpu

        keep_trainable_on_cpu(model)
    elif device is not None:
        model = model.to(device)
    freeze_parts(model, freeze)
    return model


def unwrap(model):
    """The Qwen2.5-VL model inside wrappers (DDP, DeepSpeed, PEFT)."""
    while hasattr(model, "module"):
        model = model.module
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def freeze_parts(model, parts: Iterable[str]) -> None:
    """Stop training the named parts: `vision_tower` (the visual encoder without its merger), `projector` (the
    merger), `language_model` (with the output layer). ValueError for another name."""
    base = unwrap(model)
    projector = list(base.model.visual.merger.parameters())
    inside = {id(parameter) for parameter in projector}
    groups = {
        "vision_tower": [p for p in base.model.visual.parameters() if id(p) not in inside],
        "projector": projector,
        "language_model": [*base.model.language_model.parameters(), *base.lm_head.parameters()],
    }
    for part in parts:
        if part not in groups:
            raise ValueError(f"freeze: there is no part {part!r}; the parts are {', '.join(MODEL_PARTS)}")
        for parameter in groups[part]:
            parameter.requires_grad_(False)


def _check_path(path: str | Path) -> None:
    """A folder, or a hub name `owner/name`, which Transformers looks up in its cache or on the hub."""
    if is_hub_name(path):
        check_reachable(str(path))
    elif not Path(path).is_dir():
        raise ValueError(
            f"{path}: no such folder; a model is a folder with config.json, weights and tokenizer"
        )


def _check_model_type(folder: Path) -> None:
    if not folder.is_dir():
        return
    config = folder / "config.json"
    if not config.is_file():
        raise ValueError(
            f"{folder} has no config.json, so it is not a model folder; does it name a run folder?"
        )
    model_type = json.loads(config.read_text(encoding="utf-8")).get("model_type")
    if model_type != "qwen2_5_vl":
        raise ValueError(
            f"{folder} holds a model of type {model_type!r}; only Qwen2.5-VL (qwen2_5_vl) is supported"
        )


def _load(path: str | Path, what: str, load):
    try:
        return load()
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: the {what} cannot be loaded: {error}") from error


# ---------------------------------------------------------------- naming a model


ModelKind = Literal["hf", "vllm", "openai", "script"]


@dataclass(frozen=True)
class ModelSpec:
    """A parsed model name."""

    kind: ModelKind
    target: str
    """A path, or for `openai` the model's name at the endpoint."""
    url: str = ""
    """For `openai`: the base URL; for `vllm`: that of a `visor vllm-serve`, or empty for an engine in this
    process."""


def parse_model_spec(spec: str) -> ModelSpec:
    """Read `hf:PATH`, `vllm:PATH`, `vllm:PATH@URL`, `openai:NAME@URL` or `script:FILE`; ValueError for
    anything else."""
    kind, separator, target = spec.partition(":")
    if not separator or kind not in get_args(ModelKind) or not target:
        raise ValueError(f"{spec!r} does not name a model; use {SPEC_FORMS}")
    match = re.fullmatch(r"(.+)@(https?://\S+)", target)
    if match is not None and kind == "vllm":
        return ModelSpec("vllm", match[1], match[2])
    if kind != "openai":
        return ModelSpec(cast(ModelKind, kind), target)
    if match is None:
        raise ValueError(
            f"{spec!r} does not name an endpoint; use openai:NAME@URL with a URL such as http://host:8000/v1"
        )
    return ModelSpec("openai", match[1], match[2])


def _no_images(ref: ImageRef) -> Image:
    raise ValueError(f"this client was made without an image source, so {ref.page_id} cannot be shown to it")


def make_client(
    spec: str | ModelSpec,
    *,
    images: ImageSource | None = None,
    dtype: str = "auto",
    device: str | None = None,
    attn_implementation: str | None = None,
    max_context: int | None = None,
    max_images: int | None = None,
    batch_size: int = 64,
    engine_args: dict[str, Any] | None = None,
    timeout: float = 600.0,
    max_retries: int = 5,
    openai_args: dict[str, Any] | None = None,
) -> PolicyClient:
    """The policy client a spec names. `images` gives the pictures; without it only text can be asked.

    `dtype`, `device`, `attn_implementation` and `batch_size` are of `hf`; `engine_args` are vLLM's own engine
    arguments (a server has its own), `timeout` (seconds) is of `openai` and of a vLLM server, `max_retries`
    and `openai_args` (further ones of `OpenAIClient`) are of `openai`. `max_context` (tokens, prompt and
    reply) and `max_images` bound a request.
    """
    spec = parse_model_spec(spec) if isinstance(spec, str) else spec
    if spec.kind == "script":
        from visor.models.scripted import ScriptedClient

        return ScriptedClient.from_file(spec.target)
    images = images or _no_images
    if spec.kind == "openai":
        from visor.models.openai import OpenAIClient

        return OpenAIClient(
            spec.target,
            spec.url,
            images,
            max_images=max_images,
            max_retries=max_retries,
            timeout=timeout,
            **(openai_args or {}),
        )
    renderer = load_processor(spec.target).renderer()
    if spec.kind == "vllm":
        from visor.models.vllm import VLLMClient

        engine = _vllm_engine(spec, max_context, max_images, {"dtype": dtype, **(engine_args or {})}, timeout)
        return VLLMClient(engine, renderer, images, max_images=max_images)
    from visor.models.transformers import TransformersClient

    model = load_model(spec.target, dtype=dtype, device=device, attn_implementation=attn_implementation)
    return TransformersClient(
        model,
        renderer,
        images,
        max_context=max_context,
        max_images=max_images,
        batch_size=batch_size,
        name=Path(spec.target).name,
    )


def _vllm_engine(
    spec: ModelSpec,
    max_context: int | None,
    max_images: int | None,
    engine_args: dict[str, Any],
    timeout: float,
) -> SamplingEngine:
    if spec.url:
        from visor.models.vllm_remote import RemoteEngine

        return RemoteEngine(spec.url, spec.target, max_context=max_context, timeout=timeout)
    from visor.models.vllm_engine import LocalEngine

    return LocalEngine(spec.target, max_context=max_context, max_images=max_images, engine_args=engine_args)
