"""What a question costs: calls, pictures, bytes, tokens and money."""

from __future__ import annotations

from rollout.analyses.frame import Value
from rollout.analyses.prices import (
    Price,
    Prices,
    completion_tokens,
    image_tokens,
    is_estimated,
    money,
    prompt_tokens,
)
from rollout.analyses.study import Run, Study
from rollout.analyses.table import Cell, Figure, Table
from rollout.results import ResultRow

MEGABYTE = 1_000_000


def calls(row: ResultRow) -> int:
    """All model calls: the policy's, the forced answer among them, and the layer's for the slots."""
    return row.calls + row.slot_calls


def megabytes(row: ResultRow) -> float | None:
    """Base64 bytes of the pictures, summed over the calls, in 10⁶ bytes."""
    return None if row.image_bytes is None else sum(row.image_bytes) / MEGABYTE


def largest_megabytes(row: ResultRow) -> float | None:
    return None if row.image_bytes is None else max(row.image_bytes, default=0) / MEGABYTE


def cost(study: Study) -> Table | str:
    """Table 6: means a question of model calls, images sent, MB of base64 images summed over the calls,
    and MB of the largest single call."""
    rows: list[list[Cell]] = [
        [
            run.name,
            _mean(study, run, calls),
            _mean(study, run, lambda row: sum(row.context_images)),
            _mean(study, run, megabytes),
            _mean(study, run, largest_megabytes),
            _mean(study, run, lambda row: row.seconds.get("wall")),
            _change(study, run, calls),
            _change(study, run, megabytes),
        ]
        for run in study.runs
    ]
    header = ("run", "model calls", "images sent", "MB", "largest call, MB", "seconds", "Δ calls", "Δ MB")
    notes = [
        f"{run.name}: {slots} of the calls were for TAEC's slots"
        for run in study.runs
        if (slots := sum(row.slot_calls for rows_ in run.questions for row in rows_))
    ]
    return Table("cost", "Cost, mean a question", header, rows, notes)


def tokens(study: Study) -> Table | str:
    """Mean tokens a question and, with a price table, money: as counted by endpoint or tokenizer, else by the
    rule of thumb."""
    prices = study.prices
    rows: list[list[Cell]] = []
    notes = []
    for run in study.runs:
        price = prices.of(run.model) if prices else None
        row: list[Cell] = [
            run.name,
            _mean(study, run, prompt_tokens),
            _mean(study, run, image_tokens),
            _mean(study, run, completion_tokens),
        ]
        if prices:
            one = None if price is None else _mean(study, run, _thousand(price))
            row += [one, _difference(study, run, prices)]
        rows.append(row)
        estimated = sum(is_estimated(r) for rows_ in run.questions for r in rows_)
        total = sum(map(len, run.questions))
        if estimated:
            notes.append(f"{run.name}: tokens of {estimated} of {total} rows are estimated, four bytes each")
        if any(not r.estimated_tokens for rows_ in run.questions for r in rows_):
            notes.append(f"{run.name}: some rows were made before tokens were kept and count 0")
        if prices and price is None:
            notes.append(f"{run.name}: the price table has neither {run.model or 'its model'} nor default")
    header = ["run", "prompt tokens", "of them pictures", "reply tokens"]
    if prices:
        header += [f"{prices.currency} for 1000 questions", "difference"]
    return Table("tokens", "Tokens and money, mean a question", header, rows, notes)


def _difference(study: Study, run: Run, prices: Prices) -> Figure | None:
    """In money for 1000 questions, to the first run."""
    base = study.baseline
    first, second = prices.of(base.model), prices.of(run.model)
    if run is base or first is None or second is None:
        return None
    return study.frame.difference(
        base.measure(_thousand(first)),
        run.measure(_thousand(second)),
        "change",
    )


def _thousand(price: Price) -> Value:
    """Money for a thousand questions like this one."""
    return lambda row: 1000 * money(row, price)


def _change(study: Study, run: Run, value: Value) -> Figure | None:
    """To the first run."""
    if run is study.baseline:
        return None
    return study.frame.difference(study.baseline.measure(value), run.measure(value), "change")


def _mean(study: Study, run: Run, value: Value) -> Figure:
    return study.frame.figure(run.measure(value), "number")
