"""The wording of the systems other than VISOR: one YAML file a system, which a user can replace."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import ClassVar, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from visor.env.prompts import PLACEHOLDER

SHIPPED = Path(__file__).parent / "prompts"


class SystemPrompts(BaseModel):
    """Texts of one system. `placeholders` lists, for each field that may hold any, which ones."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    placeholders: ClassVar[dict[str, set[str]]] = {}

    name: str
    system: str

    @model_validator(mode="after")
    def _known_placeholders(self) -> SystemPrompts:
        for field in type(self).model_fields:
            allowed = self.placeholders.get(field, set())
            unknown = sorted(set(PLACEHOLDER.findall(getattr(self, field))) - allowed)
            if unknown:
                known = ", ".join(f"{{{name}}}" for name in sorted(allowed)) or "none"
                raise ValueError(
                    f"{field} has the unknown placeholder {{{unknown[0]}}}; allowed here: {known}"
                )
        if not self.system.strip():
            raise ValueError("system is empty; use a word such as 'agent'")
        return self

    @property
    def identity(self) -> dict[str, str]:
        """Name and hash, for the record."""
        return {"name": self.name, "sha256": hashlib.sha256(self.model_dump_json().encode()).hexdigest()}


class VanillaPrompts(SystemPrompts):
    placeholders = {
        "question": {"question"},
        "page": {"number"},
        "pages_end": {"question"},
        "no_page": {"question"},
    }

    question: str
    page: str
    """Stands before each picture."""
    pages_end: str
    """Stands after the last picture."""
    no_page: str
    """Stands in place of the pictures when the search found none."""


class ReactPrompts(SystemPrompts):
    placeholders = {
        "question": {"question"},
        "page": {"number", "caption"},
        "pages_end": {"question"},
        "no_page": {"question"},
        "repeated": {"question"},
        "invalid": {"reason", "question"},
        "forced_answer": {"question"},
        "plain_question": {"question"},
    }

    tags: str
    """Follows the system text where calls are made in tags."""
    question: str
    search_tool: str
    query_argument: str
    answer_tool: str
    response_argument: str
    page: str
    pages_end: str
    no_page: str
    repeated: str
    """Answers a query that was sent before."""
    invalid: str
    forced_answer: str
    """Precedes the call after the last one."""
    plain_question: str
    """The last thing asked, without tools, when the forced-answer call brought no answer either."""


class DagPrompts(SystemPrompts):
    placeholders = {
        "question": {"question"},
        "graph": {"graph"},
        "dead_end": {"query", "outcome"},
        "picture": {"number"},
        "found": {"node"},
        "nothing_new": {"node"},
        "invalid": {"reason"},
        "forced_answer": {"question"},
        "plain_question": {"question"},
        "settled_argument": {"slots"},
    }

    question: str
    graph: str
    hints: str
    """Heading of the hints; left out without any."""
    dead_end: str
    early_stop: str
    memory: str
    """Heading of the pictures that are shown again; left out without any."""
    picture: str
    found: str
    nothing_new: str
    summarise: str
    """Follows the pages of a search."""
    invalid: str
    forced_answer: str
    plain_question: str
    search_tool: str
    id_argument: str
    parents_argument: str
    query_argument: str
    summary_tool: str
    summarize_argument: str
    memorize_argument: str
    picture_argument: str
    priority_argument: str
    settled_argument: str
    """Only where the model reports which slots are settled."""
    answer_tool: str
    answer_parents_argument: str
    answer_argument: str


PromptsT = TypeVar("PromptsT", bound=SystemPrompts)


def load_system_prompts(kind: type[PromptsT], system: str, name_or_path: str | None) -> PromptsT:
    """The wording of a system: its own, its shipped variant `SYSTEM_NAME`, or a YAML file of the user's.

    ValueError naming the file when it is missing, no YAML mapping or has a wrong or unknown field.
    """
    name = system if name_or_path is None else f"{system}_{name_or_path}"
    path = SHIPPED / f"{name}.yaml"
    if not path.is_file():
        path = Path(name_or_path or name)
    if not path.is_file():
        variants = sorted(file.stem.removeprefix(f"{system}_") for file in SHIPPED.glob(f"{system}_*.yaml"))
        known = f" or one of {', '.join(variants)}" if variants else ""
        raise ValueError(f"{system} has no prompts {name_or_path!r}: give the path of a YAML file{known}")
    try:
        return kind.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (ValidationError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"prompt file {path} is not usable: {error}") from error
