"""What calls cost in money: a price table in YAML, per million tokens.

currency: USD
models:
  gpt-4o-mini: {prompt: 0.15, completion: 0.60}
  my-model: {prompt: 0.30, completion: 2.50, image: 0.20}
  default: {prompt: 0.30, completion: 2.50}
"""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import Field, ValidationError

from rollout.results import ResultRow
from visor.types import Record

MILLION = 1_000_000


class Price(Record):
    """Money per million tokens."""

    prompt: float = Field(ge=0)
    completion: float = Field(ge=0)
    image: float | None = Field(None, ge=0)
    """Of the pictures' tokens in a prompt; None = they cost what the rest of the prompt costs."""


class Prices(Record):
    currency: str = "USD"
    models: dict[str, Price]
    """By the model's name at its endpoint, or the folder name of a checkpoint; `default` = any other."""

    def of(self, model: str) -> Price | None:
        return self.models.get(model) or self.models.get("default")


def read_prices(path: str | Path) -> Prices:
    """Read a price table. ValueError naming the file and the field for one that cannot be used."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: there is no such price table")
    try:
        return Prices.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"])) or "the file"
        raise ValueError(
            f"{path}: {place}: {problem['msg']}; expected models: {{NAME: {{prompt: …, completion: …}}}}"
        ) from None


def prompt_tokens(row: ResultRow) -> int:
    """Of all calls, the layer's slot call included, which nothing counts: that part is estimated."""
    return _prompt(row) + row.estimated_tokens.get("slot_prompt", 0)


def completion_tokens(row: ResultRow) -> int:
    """Of all replies, the slot call's included."""
    replies = row.estimated_tokens.get("reply", 0) if row.new_tokens is None else row.new_tokens
    return replies + row.estimated_tokens.get("slot_reply", 0)


def image_tokens(row: ResultRow) -> int:
    """Of the pictures in all prompts, never more than the prompts have."""
    images = row.estimated_tokens.get("images", 0) if row.image_tokens is None else row.image_tokens
    return min(images, _prompt(row))


def is_estimated(row: ResultRow) -> bool:
    """Whether any of the policy calls' tokens are by the rule of thumb."""
    return row.prompt_tokens is None or row.new_tokens is None


def money(row: ResultRow, price: Price) -> float:
    """(prompt − image) · prompt price + image · image price + completion · completion price."""
    prompt, images = prompt_tokens(row), image_tokens(row)
    image_price = price.prompt if price.image is None else price.image
    total = (prompt - images) * price.prompt + images * image_price
    return (total + completion_tokens(row) * price.completion) / MILLION


def _prompt(row: ResultRow) -> int:
    if row.prompt_tokens is not None:
        return row.prompt_tokens
    return row.estimated_tokens.get("prompt_text", 0) + row.estimated_tokens.get("images", 0)
