"""The texts the environment speaks, one template an event (the events of VISOR's Figure 9).

A prompt set is a YAML file. `{question}` and the other placeholders named below are replaced in one pass,
so that braces in a question, a thought or a page name stay what they are.
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

SHIPPED = Path(__file__).parent / "prompts"
PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


def fill(template: str, **values: str) -> str:
    """Replace each `{name}` by its value. Values are never looked into, so their braces are literal."""
    return PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), template)


class EventPrompt(BaseModel):
    """The text of one event and its intent injection, which the switch of the same name leaves out."""

    model_config = ConfigDict(extra="forbid")

    text: str
    """Placeholder: `{reason}`, in `invalid_action` only."""
    intent: str
    """Restates the question. Placeholder: `{question}`."""


class PromptSet(BaseModel):
    """All templates of one wording. A field may be empty: the part is then left out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    system: str
    """Rules of the game. Not empty: Qwen's chat template would put its own system turn in the gap.
    Placeholder: `{box_rule}`, the one of `box_rules` that fits the space of the boxes."""
    box_rules: dict[str, str] = {}
    """By box space (`norm1000`, `pixels`)."""
    question: str
    """The user's turn. Placeholder: `{question}`."""
    evidence_header: str
    evidence_heading: str = ""
    """Line above the thoughts of a page. Placeholder: `{page_id}`."""
    evidence_line: str
    """One thought. Placeholder: `{thought}`."""
    page_observation: EventPrompt
    crop_evaluation: str
    """Follows a page: when a crop is worth a turn (visual action evaluation)."""
    verification_hint: str
    """Follows a page that a verification search brought."""
    crop_observation: EventPrompt
    crop_correction: str
    """Follows a crop: what to do when it shows nothing of use (visual action correction)."""
    invalid_action: EventPrompt
    no_new_page: EventPrompt
    """A search whose candidates have all been shown; only an answer can follow."""
    no_match: EventPrompt
    """A search for which the retriever has no candidate at all; other words may have."""
    forced_answer: EventPrompt
    """Follows the last observation; the whole evidence block comes after it."""
    evidence_pointer: str = ""
    """Part of the intent injection: directs to the evidence block. Left out where there is no such block."""
    separator: str = "\n"
    """Stands between the parts of a message and between the lines of the evidence block."""

    @model_validator(mode="after")
    def _known_placeholders(self) -> PromptSet:
        allowed = {
            "system": {"box_rule"},
            "question": {"question"},
            "evidence_heading": {"page_id"},
            "evidence_line": {"thought"},
        }
        for field in type(self).model_fields:
            value = getattr(self, field)
            if isinstance(value, str):
                _check_placeholders(field, value, allowed.get(field, set()))
            elif isinstance(value, EventPrompt):
                _check_placeholders(
                    f"{field}.text", value.text, {"reason"} if field == "invalid_action" else set()
                )
                _check_placeholders(f"{field}.intent", value.intent, {"question"})
        if not self.system.strip():
            raise ValueError(
                "system is empty: Qwen's chat template would add its own; use a word such as 'agent'"
            )
        return self

    def join(self, parts: list[str]) -> str:
        """Join the parts that are not empty."""
        return self.separator.join(part for part in parts if part)


def _check_placeholders(field: str, template: str, allowed: set[str]) -> None:
    unknown = sorted(set(PLACEHOLDER.findall(template)) - allowed)
    if unknown:
        known = ", ".join(f"{{{name}}}" for name in sorted(allowed)) or "none"
        raise ValueError(f"{field} has the unknown placeholder {{{unknown[0]}}}; allowed here: {known}")


def load_prompts(name_or_path: str) -> PromptSet:
    """Load a shipped prompt set by name, or one of your own by path.

    Raises ValueError naming the file when it is missing, no YAML mapping or has a wrong or unknown field.
    """
    path = SHIPPED / f"{name_or_path}.yaml"
    if not (re.fullmatch(r"[\w-]+", name_or_path) and path.is_file()):
        path = Path(name_or_path)
    if not path.is_file():
        shipped = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.yaml")))
        raise ValueError(f"no prompt set {name_or_path!r}: give the path of a YAML file or one of {shipped}")
    try:
        return PromptSet.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (ValidationError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"prompt file {path} is not usable: {error}") from error
