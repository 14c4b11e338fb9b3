"""HTML pieces of the report. What comes from data goes through `escape`: it never becomes markup."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from rollout.metrics import SHARES, Metrics
from rollout.pictures import Picture, Pictures
from rollout.results import ResultRow
from visor.types import Answer, Box, Crop, Invalid, ObservationKind, Search, Summary, Trajectory, Turn

SKELETON = Path(__file__).with_name("report.html")
TILES = (
    "accuracy",
    "completeness",
    "verification_share",
    "over_search_share",
    "finish_rate",
    "invalid_action_rate",
    "mean_reward",
    "mean_searches",
    "mean_context_images",
    "box_usage",
    "n",
    "failed",
)


def document(title: str, body: Sequence[str]) -> str:
    """A whole page. `body` is markup made by the functions here; `title` is text."""
    before, _, rest = SKELETON.read_text(encoding="utf-8").partition("{{title}}")
    middle, _, after = rest.partition("{{body}}")
    return "".join([before, escape(title), middle, "\n".join(body), after])


def number(name: str, value: Any) -> str:
    """A figure for reading: shares in percent, other fractions to three digits."""
    if value is None:
        return "–"
    if name in SHARES:
        return f"{100 * float(value):.1f} %"
    return f"{value:.3f}" if isinstance(value, float) else escape(str(value))


def tiles(metrics: Metrics) -> str:
    cells = [
        f'<div class="tile"><b>{number(name, metrics[name])}</b><span>{_words(name)}</span></div>'
        for name in TILES
        if name in metrics
    ]
    return f'<div class="tiles">{"".join(cells)}</div>'


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table of text cells."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = ["<tr>" + "".join(f"<td>{escape(str(c))}</td>" for c in row) + "</tr>" for row in rows]
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


def metric_tables(metrics: Metrics) -> str:
    """All figures, folded, and one table a tag."""
    plain = [(_words(k), number(k, v)) for k, v in metrics.items() if not isinstance(v, dict)]
    for group in ("stop_reasons", "seconds"):
        plain += [(f"{_words(group)}: {_words(k)}", number(k, v)) for k, v in metrics.get(group, {}).items()]
    columns = ("n", "accuracy", "completeness", "verification_share", "finish_rate", "mean_searches")
    parts = [f"<details><summary>All figures</summary>{table(('figure', 'value'), plain)}</details>"]
    for tag, classes in metrics.get("by_tag", {}).items():
        rows = [(value, *(number(c, figures[c]) for c in columns)) for value, figures in classes.items()]
        parts.append(f"<h3>By {escape(tag)}</h3>" + table((tag, *map(_words, columns)), rows))
    return "".join(parts)


def trajectory_card(trajectory: Trajectory, row: ResultRow, pictures: Pictures, opened: bool = False) -> str:
    """One folded trajectory: what was asked and said, every turn, the reward's parts."""
    gold = set(row.gold_page_ids)
    turns = "".join(_turn(turn, trajectory, pictures, gold) for turn in trajectory.turns)
    said = "no answer" if row.answer is None else f"answer: {row.answer or '(empty)'}"
    facts = {
        "gold answer": " | ".join(row.gold_answers) or "–",
        "gold pages": ", ".join(row.gold_page_ids) or "–",
        "stopped by": row.stop_reason or "–",
        "reward": _reward_text(trajectory),
    }
    if row.error:
        facts["fault"] = row.error
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    name = f"{row.question_id} / {row.sample_index}"
    return (
        f'<details class="case"{" open" if opened else ""}><summary>{_verdict(row)}{escape(row.question)}'
        f'<span class="said">{escape(said)}</span></summary><div class="inside">'
        f'<dl class="facts"><dt>question</dt><dd>{escape(name)}</dd>{listed}</dl>{turns}</div></details>'
    )


def evidence_text(turn: Turn, trajectory: Trajectory) -> str:
    """The evidence block of a turn's context: the user message between the prompt and the window, or ""."""
    rest = turn.context[len(trajectory.prompt) :]
    return rest[0].text if rest and rest[0].role == "user" else ""


def _words(name: str) -> str:
    return escape(name.replace("_", " "))


def _verdict(row: ResultRow) -> str:
    if row.error:
        return '<span class="badge warn">fault</span>'
    if row.answer is None:
        return '<span class="badge wrong">no answer</span>'
    if row.unjudged:
        return '<span class="badge warn">no verdict</span>'
    word = "right" if row.correct else "wrong"
    return f'<span class="badge {word}">{word}</span>'


def _reward_text(trajectory: Trajectory) -> str:
    reward = trajectory.reward
    if reward is None:
        return "not scored"
    if reward.total is None:
        return f"unscored: {reward.unscored_reason}"
    parts = {
        "retrieval": reward.retrieval,
        "answer": reward.answer,
        "I_format": reward.format_penalty,
        "T": reward.searches,
        "t*": reward.complete_at,
        "Δ": reward.delta,
        "judge": reward.judge,
    }
    listed = ", ".join(f"{name} {'–' if value is None else value}" for name, value in parts.items())
    return f"{reward.total:.3f} ({listed})"


def _turn(turn: Turn, trajectory: Trajectory, pictures: Pictures, gold: set[str]) -> str:
    kind, action = _action(turn)
    marks = {"verification": turn.is_verification, "by the system": turn.by_system}
    flags = [*turn.flags, *(mark for mark, holds in marks.items() if holds)]
    badges = "".join(f'<span class="badge">{escape(flag)}</span>' for flag in flags)
    thought = f'<p class="thought">{escape(turn.think)}</p>' if turn.think else ""
    return (
        f'<div class="turn {kind}"><h4>Turn {turn.index + 1} · {kind}</h4>{thought}'
        f'<p class="action">{badges}{action}</p>{_observation(turn, pictures, gold)}'
        f"{_context(turn, trajectory)}</div>"
    )


def _action(turn: Turn) -> tuple[str, str]:
    match turn.action:
        case Search():
            return "search", f"search <code>{escape(turn.query or turn.action.query)}</code>"
        case Crop(box=box, space=space):
            return "crop", f"crop <code>{escape(json.dumps(list(box)))}</code> ({escape(space)})"
        case Answer(text=text):
            return "answer", f"answer <code>{escape(text)}</code>"
        case Summary(text=text, memorised=memorised):
            kept = ", ".join(f"{item.page_id} ({item.priority})" for item in memorised) or "no picture"
            return "summary", f"{escape(text)}<br>keeps <code>{escape(kept)}</code>"
        case Invalid(reason=reason, raw=raw):
            return "invalid", f"{escape(reason)}<pre>{escape(raw)}</pre>"


def _observation(turn: Turn, pictures: Pictures, gold: set[str]) -> str:
    observation = turn.observation
    if observation is None:
        return ""
    figures = [_figure(page_id, pictures.get(page_id), page_id in gold) for page_id in observation.page_ids]
    if observation.kind == ObservationKind.CROP and observation.crop:
        page_id, box = observation.page_ids[0], observation.crop
        figures = [
            _figure(page_id, pictures.get(page_id), page_id in gold, box),
            _figure(f"crop {list(box)}", pictures.get(page_id, box), False),
        ]
    label = observation.kind.value.replace("_", " ") + (
        " · forced answer" if observation.forced_answer else ""
    )
    shown = f'<div class="pictures">{"".join(figures)}</div>' if figures else ""
    text = f"<pre>{escape(observation.message.text)}</pre>"
    return f"{shown}<details><summary>observation: {escape(label)}</summary>{text}</details>"


def _figure(caption: str, picture: Picture | None, gold: bool, box: Box | None = None) -> str:
    label = escape(caption) + (" · gold" if gold else "")
    if picture is None:
        return f"<figure><figcaption>{label} (no picture)</figcaption></figure>"
    overlay = _overlay(box, picture.source_size) if box else ""
    return (
        f'<figure><div class="frame{" gold" if gold else ""}">'
        f'<img src="{picture.uri}" alt="{escape(caption)}" width="{picture.shown_width}">{overlay}</div>'
        f"<figcaption>{label}</figcaption></figure>"
    )


def _overlay(box: Box, size: tuple[int, int]) -> str:
    """The box in percent of the page, so that it holds at any display size."""
    x1, y1, x2, y2 = box
    width, height = size
    style = (
        f"left:{100 * x1 / width:.2f}%;top:{100 * y1 / height:.2f}%;"
        f"width:{100 * (x2 - x1) / width:.2f}%;height:{100 * (y2 - y1) / height:.2f}%"
    )
    return f'<i style="{style}"></i>'


def _context(turn: Turn, trajectory: Trajectory) -> str:
    images = sum(len(message.images) for message in turn.context)
    evidence = evidence_text(turn, trajectory)
    block = f"<pre>{escape(evidence)}</pre>" if evidence else "<p>No evidence is shown at this call.</p>"
    shown = f"{images} image{'s' * (images != 1)}, {'evidence' if evidence else 'no evidence'}"
    return f"<details><summary>context: {shown}</summary>{block}</details>"
