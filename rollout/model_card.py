"""The README.md of a trained model's folder, a model card in the form of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from visor.models.hub import is_hub_name
from visor.models.lora import base_model_of, is_adapter

CARD = "README.md"
_PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate")

_LOAD_WHOLE = """\
```python
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

model = Qwen2_5_VLForConditionalGeneration.from_pretrained("{name}", dtype="auto")
processor = AutoProcessor.from_pretrained("{name}")
```"""
_LOAD_ADAPTER = """\
```python
from peft import PeftModel
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

base = Qwen2_5_VLForConditionalGeneration.from_pretrained("{base}", dtype="auto")
model = PeftModel.from_pretrained(base, "{name}")
processor = AutoProcessor.from_pretrained("{name}")
```"""


@dataclass(frozen=True)
class CardFacts:
    """What a card tells beside what it reads from the folder."""

    name: str
    """Of the model: its repository, or its folder's name."""
    method: str
    """In words, a sentence without its full stop."""
    start: str
    """Path or hub name of the model that training started from."""
    tags: Sequence[str] = ()
    datasets: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Use ("training questions", "corpus") → paths or names."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    figures_of: str = ""
    """What the figures were measured on."""
    settings: Mapping[str, Any] = field(default_factory=dict)


def write_card(folder: str | Path, facts: CardFacts) -> None:
    """Write the card of a model's folder. A licence that its owner entered into an earlier one stays."""
    folder = Path(folder)
    text = model_card(facts, adapter=is_adapter(folder), license=_license(folder / CARD))
    (folder / CARD).write_text(text, encoding="utf-8")


def model_card(facts: CardFacts, *, adapter: bool, license: str | None = None) -> str:
    """The card's text: metadata as YAML between dashes, and Markdown.

    Names of things on this machine are given without their paths. `base_model` is the model on the hub that
    the training goes back to, left out when there is none. No licence is chosen here.
    """
    from huggingface_hub import ModelCardData

    base = hub_ancestor(facts.start)
    names = {use: [short_name(path) for path in paths] for use, paths in facts.datasets.items()}
    published = sorted({path for paths in facts.datasets.values() for path in paths if is_hub_name(path)})
    data = ModelCardData(
        base_model=base,
        base_model_relation=None if base is None else "adapter" if adapter else "finetune",
        library_name="peft" if adapter else "transformers",
        pipeline_tag="image-text-to-text",
        tags=["visual-rag", "visor", *facts.tags, *(["lora"] if adapter else [])],
        datasets=published or None,
        license=license,
    )
    how = (_LOAD_ADAPTER if adapter else _LOAD_WHOLE).format(name=facts.name, base=base or "BASE MODEL")
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {facts.name}",
        f"{facts.method}, from `{short_name(facts.start)}`."
        + (" The folder holds an adapter; its base model is loaded beneath it." if adapter else ""),
        "## Data\n\n" + "\n".join(f"- {use}: {', '.join(listed)}" for use, listed in names.items() if listed),
    ]
    if facts.figures:
        parts.append(f"## Figures\n\n{facts.figures_of}\n\n{_table(('figure', 'value'), facts.figures)}")
    parts += [
        f"## Loading\n\n{how}\n\n"
        "As an agent, with retrieval and its tools: `visor ask CORPUS QUESTION --model hf:PATH`, and "
        "`python -m rollout.evaluate --system visor --checkpoint PATH …`.",
        f"## Training settings\n\n{_table(('setting', 'value'), facts.settings)}",
        "Versions: " + ", ".join(f"{package} {version(package)}" for package in _PACKAGES) + ".",
    ]
    return "\n\n".join(parts) + "\n"


def short_name(path: str) -> str:
    """A name that says nothing of the machine: a hub name as it is, else the last part of the path."""
    return path if is_hub_name(path) and not Path(path).exists() else Path(path).name or path


def hub_ancestor(path: str | Path) -> str | None:
    """The model on the hub that a model goes back to: itself, or that of the folder's own card, or that of an
    adapter's base. None when there is none."""
    path = str(path)
    if not Path(path).exists():
        return path if is_hub_name(path) else None
    named = _metadata(Path(path) / CARD).get("base_model")
    if isinstance(named, str) and is_hub_name(named):
        return named
    return hub_ancestor(base_model_of(path)) if is_adapter(path) else None


def _metadata(card: Path) -> dict:
    """The metadata of a card, {} where there is none that can be read."""
    from huggingface_hub import metadata_load

    try:
        return metadata_load(card) or {} if card.is_file() else {}
    except Exception:  # a card written by others may hold anything, and stops no training
        return {}


def _license(card: Path) -> str | None:
    named = _metadata(card).get("license")
    return named if isinstance(named, str) else None


def _table(header: tuple[str, str], rows: Mapping[str, Any]) -> str:
    lines = ["| {} | {} |".format(*header), "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {_shown(value)} |" for name, value in rows.items())])


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(str, value)) or "–" if isinstance(value, list) else str(value)
