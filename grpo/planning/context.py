"""The longest prompts and training rows that a configuration allows, and those of a typical episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache

from grpo.arguments import GrpoConfig
from grpo.planning.pictures import crop_budget, page_budget
from grpo.planning.rehearsal import CallLength, Kind, Rehearsal
from grpo.planning.scene import Material
from grpo.planning.wording import Filler
from rollout.rows import trajectory_row, turn_rows
from visor.env.observations import ObservationWriter
from visor.env.prompts import fill, load_prompts
from visor.env.window import first_in_window
from visor.models.rendering import ChatRenderer
from visor.types import Trajectory

CLOSING = 2
"""Tokens after a reply that was cut: the end of turn and the newline of the chat format."""


@dataclass(frozen=True)
class RowLength:
    """One training row."""

    tokens: int
    visual: int
    """Image tokens among them."""
    sampled: int
    """Trained tokens among them."""


@dataclass(frozen=True)
class Rows:
    """The training rows of one trajectory in one credit mode."""

    rows: int
    tokens: int
    """Of all of them together."""
    visual: int
    longest: RowLength


@dataclass
class ContextPlan:
    """Lengths in tokens, images expanded."""

    calls: list[CallLength]
    """The longest prompt of each call, whatever the limits say."""
    page_budget: tuple[int, int]
    """Image tokens that the budget of a page means, least and most."""
    crop_budget: tuple[int, int]
    page_tokens: int
    """Image tokens of the fullest page."""
    crop_tokens: int
    worst: dict[str, Rows]
    """By credit mode: what a trajectory can take within `max_prompt_length`, before `max_length` cuts."""
    typical: dict[str, Rows]
    typical_calls: list[CallLength]
    max_prompt: int
    """The longest prompt that is sampled from: `max_prompt_length` or what the settings lead to."""
    max_context: int
    """Prompt and reply."""
    max_images: int
    """Of one prompt."""
    stopped_at: int | None = None
    """The first call whose longest prompt is over `max_prompt_length`."""
    first_page_prompt: int = 0
    """The shortest prompt with a page of the fullest kind."""
    possible: list[Kind] = field(default_factory=list)
    """What a reply of the given length can bring about."""


def plan_context(
    config: GrpoConfig, renderer: ChatRenderer, material: Material, turns: int, reply_tokens: int
) -> ContextPlan:
    """Rehearse the longest episode and the typical one, which has `turns` calls with replies of
    `reply_tokens` tokens and a page after each but the last."""
    prompts = load_prompts(config.episode.prompts)
    filler = Filler(renderer)

    def rehearsal(scene, tokens: int, cut: bool) -> Rehearsal:
        return Rehearsal(scene, config.episode, prompts, renderer, filler, reply_tokens=tokens, cut=cut)

    longest = rehearsal(material.worst, config.max_completion_length, True)
    calls = [longest.lengths(longest_turns(longest, call)) for call in range(config.episode.max_turns)]
    factor = renderer.patch_size * renderer.merge_size
    page, crop = page_budget(config.episode, factor), crop_budget(config.episode, factor)
    limit = config.max_prompt_length
    stopped_at = next((c.call for c in calls if limit is not None and c.total > limit), None)
    reached = max(call.total for call in calls)
    max_prompt = reached if limit is None else min(reached, limit)
    typical = rehearsal(material.typical, min(reply_tokens, config.max_completion_length), False)
    kinds: list[Kind] = ["page" if typical.reply("page") else "notice"] * (turns - 1)
    return ContextPlan(
        calls=calls,
        page_budget=page.token_range,
        crop_budget=crop.token_range,
        page_tokens=page.tokens(material.worst.page),
        crop_tokens=crop.tokens(material.worst.crop),
        worst={
            "trajectory": _longest_trajectory_row(longest, limit),
            "turn": _longest_turn_rows(calls, longest, max_prompt),
        },
        typical=_rows(typical, typical.play([*kinds, "answer" if typical.reply("answer") else "notice"])),
        typical_calls=[typical.lengths(kinds[:call]) for call in range(turns)],
        max_prompt=max_prompt,
        max_context=max_prompt + config.max_completion_length,
        max_images=max(call.images for call in calls),
        stopped_at=stopped_at,
        first_page_prompt=_first_page_prompt(longest),
        possible=[kind for kind in ("page", "crop", "answer") if longest.reply(kind)],
    )


# ---------------------------------------------------------------- the longest episode


def longest_turns(rehearsal: Rehearsal, turns: int, *, whole: bool = False) -> list[Kind]:
    """The `turns` turns after which the prompt is the longest; with `whole`, the row over all of them.

    A turn adds its observation while it is in the window, and from the next turn on a thought about it to the
    evidence. The best order is found from the tokens of each by dynamic programming: a crop follows a page.
    """
    episode = rehearsal.episode
    costs = _costs(rehearsal, turns == episode.max_turns - 1)
    first = 0 if whole else first_in_window(turns, episode.window)

    @cache
    def best(position: int, after_page: bool) -> tuple[int, tuple[Kind, ...]]:
        if position == turns:
            return 0, ()
        options = []
        for kind in costs.kinds:
            if kind == "crop" and not after_page:
                continue
            gain = costs.shown(kind, position == turns - 1) if position >= first else 0
            if position < turns - 1:
                gain += costs.evidence(kind)
            rest, following = best(position + 1, kind == "page")
            options.append((gain + rest, (kind, *following)))
        return max(options, key=lambda option: option[0])

    return list(best(0, False)[1])


class _Costs:
    """Tokens that one turn of each kind adds, to within the joints between texts.

    `last`: the turns are followed by the last call, so the newest observation carries the forced-answer
    prompt.
    """

    def __init__(self, rehearsal: Rehearsal, last: bool) -> None:
        self._rehearsal, self._last = rehearsal, last
        self.kinds: list[Kind] = [kind for kind in ("page", "crop", "notice") if rehearsal.reply(kind)]
        self._plain = {kind: self._observation(kind, None) for kind in self.kinds}
        self._final = {kind: self._observation(kind, "") for kind in self.kinds}
        self._evidence = {kind: self._thought(kind) for kind in self.kinds}

    def shown(self, kind: Kind, newest: bool) -> int:
        """Of its observation."""
        return (self._final if self._last and newest else self._plain)[kind]

    def evidence(self, kind: Kind) -> int:
        """Of the thought about it, which the last call shows twice."""
        return self._evidence[kind] * (2 if self._last else 1)

    def _observation(self, kind: Kind, final: str | None) -> int:
        scene, renderer = self._rehearsal.scene, self._rehearsal.renderer
        writer = ObservationWriter(scene.question, self._rehearsal.prompts, self._rehearsal.episode)
        if kind == "page":
            observation = writer.page(scene.page_ids[0], verification=True, final=final)
        elif kind == "crop":
            observation = writer.crop(scene.page_ids[0], (0, 0, *scene.crop), final=final)
        else:
            action = self._rehearsal.play(["notice"]).turns[0].action
            observation = writer.invalid(getattr(action, "reason", ""), final=final)
        return len(renderer.encode([observation.message], scene.picture, False).input_ids)

    def _thought(self, kind: Kind) -> int:
        rehearsal, prompts = self._rehearsal, self._rehearsal.prompts
        if kind == "notice" or not rehearsal.episode.evidence_space:
            return 0
        thought = rehearsal.play(["page"]).turns[0].think
        text = fill(prompts.evidence_line, thought=thought) + prompts.separator
        if kind == "page":
            page_id = rehearsal.scene.page_ids[0]
            text += fill(prompts.evidence_heading, page_id=page_id) + prompts.separator
        return len(rehearsal.renderer.text_ids(text))


@lru_cache(maxsize=8)
def _costs(rehearsal: Rehearsal, last: bool) -> _Costs:
    return _Costs(rehearsal, last)


def _longest_trajectory_row(rehearsal: Rehearsal, limit: int | None) -> Rows:
    """The row over the longest trajectory whose prompts all keep to `limit`.

    Exact without a limit. With one, thoughts compete with replies for the prompt: the bound is the row of a
    policy that thinks little and fills its replies, plus as much evidence as its last prompt has room for,
    which holds it twice; or, when even its prompts are too long, as many windows as the trajectory has.
    """
    last = rehearsal.episode.max_turns - 1
    turns = longest_turns(rehearsal, last, whole=True)
    longest = _row_of(rehearsal, turns, "long")
    if limit is None:
        return _one_row(longest)
    lean = _row_of(rehearsal, turns, "short")
    prompts = [rehearsal.lengths(turns[:call], "short").total for call in range(last + 1)]
    if max(prompts) <= limit:
        bound = lean.tokens + (limit - prompts[-1]) // 2
    else:
        window = rehearsal.episode.window or max(last, 1)
        room = max(limit - rehearsal.first_prompt, 0)
        bound = rehearsal.first_prompt + -(-last // window) * room + lean.sampled // (last + 1) + CLOSING
    tokens = min(longest.tokens, bound)
    return _one_row(RowLength(tokens, min(longest.visual, tokens), min(longest.sampled, tokens)))


def _row_of(rehearsal: Rehearsal, turns: Sequence[Kind], thought) -> RowLength:
    trajectory = rehearsal.play([*turns, "notice" if rehearsal.reply("notice") else "page"], thought)
    return _length(trajectory_row(trajectory, rehearsal.renderer, rehearsal.scene.picture))


def _one_row(row: RowLength) -> Rows:
    return Rows(1, row.tokens, row.visual, row)


def _longest_turn_rows(calls: Sequence[CallLength], rehearsal: Rehearsal, max_prompt: int) -> Rows:
    """A row a call, each with the longest prompt of that call."""
    reply = rehearsal.reply("notice") or rehearsal.reply("page")
    assert reply is not None
    assert reply.token_ids is not None
    sampled = len(reply.token_ids)
    lengths = [
        RowLength(min(call.total, max_prompt) + sampled + CLOSING, min(call.visual, max_prompt), sampled)
        for call in calls
    ]
    return _together(lengths)


def _first_page_prompt(rehearsal: Rehearsal) -> int:
    """The prompt of the call after a search in as few tokens as possible; 0 when no search fits a reply or
    there is no second call."""
    if not rehearsal.reply("page") or rehearsal.episode.max_turns < 2:
        return 0
    lengths = rehearsal.lengths(["page"], "short")
    return lengths.total - lengths.replies


# ---------------------------------------------------------------- rows


def _rows(rehearsal: Rehearsal, trajectory: Trajectory) -> dict[str, Rows]:
    """The rows of a trajectory in each credit mode, built by the training code."""
    renderer, picture = rehearsal.renderer, rehearsal.scene.picture
    whole = _length(trajectory_row(trajectory, renderer, picture))
    return {
        "trajectory": _one_row(whole),
        "turn": _together([_length(row) for row in turn_rows(trajectory, renderer, picture)]),
    }


def _length(row) -> RowLength:
    visual = sum(end - start for start, end in row.image_spans)
    return RowLength(len(row.input_ids), visual, sum(row.loss_mask))


def _together(lengths: Sequence[RowLength]) -> Rows:
    return Rows(
        rows=len(lengths),
        tokens=sum(row.tokens for row in lengths),
        visual=sum(row.visual for row in lengths),
        longest=max(lengths, key=lambda row: row.tokens),
    )
