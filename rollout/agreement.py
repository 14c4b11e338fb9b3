"""How far two judges agree on the answers of one run (VISOR, table 7)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollout.compare import load_results
from rollout.judgements import Judgement
from rollout.manifest import read_manifest
from rollout.recorder import Key
from rollout.tables import format_table


@dataclass(frozen=True)
class Agreement:
    """Two judges over the answers that both gave a verdict on."""

    first: str
    second: str
    both_right: int
    both_wrong: int
    only_first: int
    """Right for the first judge only."""
    only_second: int
    left_out: int = 0
    """Answers without a verdict of one of the two."""

    @property
    def n(self) -> int:
        return self.both_right + self.both_wrong + self.only_first + self.only_second

    @property
    def share(self) -> float | None:
        """Of the answers on which the two say the same; None when n is 0."""
        return (self.both_right + self.both_wrong) / self.n if self.n else None

    @property
    def kappa(self) -> float | None:
        """Cohen's: (share − chance) / (1 − chance), where chance is the agreement of two judges who call the
        same shares right at random. None when n is 0 or both say one and the same of everything."""
        if not self.n:
            return None
        right = [(self.both_right + only) / self.n for only in (self.only_first, self.only_second)]
        chance = right[0] * right[1] + (1 - right[0]) * (1 - right[1])
        return None if chance == 1 else ((self.share or 0.0) - chance) / (1 - chance)


def agreement(
    first: str, second: str, verdicts_1: Mapping[Key, bool | None], verdicts_2: Mapping[Key, bool | None]
) -> Agreement:
    """Compare the verdicts of two judges, named, by row; None = no verdict."""
    counts = {(True, True): 0, (False, False): 0, (True, False): 0, (False, True): 0}
    left_out = 0
    for key in verdicts_1.keys() | verdicts_2.keys():
        one, other = verdicts_1.get(key), verdicts_2.get(key)
        if one is None or other is None:
            left_out += 1
        else:
            counts[one, other] += 1
    return Agreement(
        first,
        second,
        counts[True, True],
        counts[False, False],
        counts[True, False],
        counts[False, True],
        left_out,
    )


def agreement_with_run(folder: str | Path, judgements: list[Judgement], judge: str) -> Agreement:
    """The run's own judge against another one that judged its answers."""
    rows = [row for row in load_results(folder) if row.finished and not row.error]
    names = sorted({row.judge for row in rows if row.judge}) or [read_manifest(folder).judge]
    own = {(row.question_id, row.sample_index): row.verdict for row in rows}
    other = {(entry.question_id, entry.sample_index): entry.verdict for entry in judgements}
    return agreement(" and ".join(names), judge, own, other)


def agreement_table(found: Agreement, style: str = "text") -> str:
    """Counts, the share of agreement and Cohen's kappa."""
    rows = [
        ("answers that both judged", found.n),
        ("both right", found.both_right),
        ("both wrong", found.both_wrong),
        (f"right for {found.first} only", found.only_first),
        (f"right for {found.second} only", found.only_second),
        ("disagree", found.only_first + found.only_second),
        ("agreement", found.share),
        ("Cohen's kappa", found.kappa),
        ("without a verdict of one", found.left_out),
    ]
    return format_table((f"{found.first} · {found.second}", "value"), rows, style)
