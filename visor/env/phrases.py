"""Phrase lists with guards against negation, kept in YAML data files."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict

CLAUSE_END = re.compile(
    r"[.,;:!?\n。，；：！？、]"
    r"|\b(?:but|so|therefore|thus|hence|however|because|although|though|while)\b"
    r"|\b(?:and|then)\b(?=\s+(?:i|let|we)\b)",
    re.IGNORECASE,
)

REACH = 80
"""Characters after a match in which its guards are looked for."""


class PhraseFile(BaseModel):
    """A phrase file. All entries are regular expressions, matched without regard to case."""

    model_config = ConfigDict(extra="forbid")

    patterns: list[str]
    """What counts."""
    guards_before: list[str] = []
    """Takes a match back when found before it in its clause, such as "cannot"."""
    guards_after: list[str] = []
    """Takes a match back when found after it in its clause, such as "is not needed"."""
    vetoes: list[str] = []
    """Takes every match back when found anywhere in the text."""


class GuardedPhrases:
    """Decides whether a text says something, and does not deny saying it."""

    def __init__(self, phrases: PhraseFile) -> None:
        self._patterns = [re.compile(p, re.IGNORECASE) for p in phrases.patterns]
        self._before = [re.compile(p, re.IGNORECASE) for p in phrases.guards_before]
        self._after = [re.compile(p, re.IGNORECASE) for p in phrases.guards_after]
        self._vetoes = [re.compile(p, re.IGNORECASE) for p in phrases.vetoes]

    @classmethod
    def load(cls, path: Path) -> GuardedPhrases:
        return cls(PhraseFile.model_validate(yaml.safe_load(path.read_text(encoding="utf-8"))))

    def match(self, text: str) -> bool:
        """True when some clause holds a pattern that no guard takes back."""
        text = text.replace("’", "'")
        if any(veto.search(text) for veto in self._vetoes):
            return False
        return any(self._in_clause(clause) for clause in CLAUSE_END.split(text))

    def _in_clause(self, clause: str) -> bool:
        # The guards before are looked for once a clause, so that the time stays linear in its length.
        denials = [found.end() for guard in self._before if (found := guard.search(clause))]
        first_denial = min(denials, default=len(clause) + 1)
        return any(
            found.start() < first_denial and not self._denied_after(clause[found.end() : found.end() + REACH])
            for pattern in self._patterns
            for found in pattern.finditer(clause)
        )

    def _denied_after(self, text: str) -> bool:
        return any(guard.search(text) for guard in self._after)
