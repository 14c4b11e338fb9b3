"""Which limits a plan meets: refusals with their numbers, and warnings.

A refusal is `always` where such a run cannot do what its settings say; those stop a real run too. The others
are of a plan alone: a run works with them, but loses something (rows cut, replies left out) or may run out of
memory in its longest step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpo.arguments import GrpoConfig
from grpo.planning.context import ContextPlan
from grpo.planning.engine import engine_shortfall
from grpo.planning.scene import Material

LARGEST_PICTURE = 16384 * 28 * 28
"""Pixels: the bound of Qwen2.5-VL's own preprocessing, beyond which engines resize again."""
SHOWN = 3
"""Pages named in a message."""


@dataclass(frozen=True)
class Finding:
    kind: Literal["always", "refused", "warning"]
    text: str

    def __str__(self) -> str:
        return f"{'warning' if self.kind == 'warning' else 'refused'}: {self.text}"


def limit_findings(
    config: GrpoConfig,
    model_config: Any,
    context: ContextPlan,
    material: Material,
    must_fit: Literal["longest", "typical"] = "longest",
) -> list[Finding]:
    """What does not fit the model, the budgets or the lengths of the settings."""
    return [
        *_model_limits(config, model_config, context),
        *_prompt_limits(config, context),
        *_row_limits(config, context, must_fit),
        *_picture_limits(config, context, material),
        *_reply_limits(config, context),
    ]


def _model_limits(config: GrpoConfig, model_config: Any, context: ContextPlan) -> Iterator[Finding]:
    positions = model_config.text_config.max_position_embeddings
    reply = config.max_completion_length
    if reply >= positions:
        yield Finding(
            "always",
            f"max_completion_length is {reply:,} and the model has {positions:,} positions; lower it",
        )
    elif context.max_context > positions:
        yield Finding(
            "always",
            f"a context of {context.max_context:,} tokens is possible ({context.max_prompt:,} of prompt and "
            f"max_completion_length {reply:,}), and the model has {positions:,} positions; set "
            f"max_prompt_length to at most {positions - reply:,}, or shorten replies, window or pictures",
        )
    shortfall = engine_shortfall(config, context)
    if shortfall:
        yield Finding("always", shortfall)
    row = min(context.worst[config.credit].longest.tokens, config.max_length)
    if row > positions:
        yield Finding(
            "always",
            f"training rows of {row:,} tokens are possible, and the model has {positions:,} positions; set "
            f"max_length to at most {positions:,}",
        )


def _prompt_limits(config: GrpoConfig, context: ContextPlan) -> Iterator[Finding]:
    limit = config.max_prompt_length
    if limit is None:
        return
    first = context.calls[0]
    stopped = next((call for call in context.typical_calls if call.total > limit), None)
    if first.total > limit:
        yield Finding(
            "always" if context.typical_calls[0].total > limit else "refused",
            f"the prompt of the first call takes up to {first.total:,} tokens (system {first.system:,}, "
            f"question {first.question:,}), over max_prompt_length {limit:,}: such a question gets no reply",
        )
    elif context.first_page_prompt > limit:
        yield Finding(
            "always",
            f"a prompt with one page takes {context.first_page_prompt:,} tokens before any reply "
            f"({context.page_tokens:,} of the page), over max_prompt_length {limit:,}: the policy never "
            "replies to a page; raise it or lower page_max_pixels",
        )
    elif stopped:
        yield Finding(
            "refused",
            f"the prompt of call {stopped.call} of a typical episode takes {stopped.total:,} tokens, over "
            f"max_prompt_length {limit:,}: it ends there, unanswered, with the stop reason length",
        )
    elif context.stopped_at:
        longest = context.calls[context.stopped_at - 1]
        yield Finding(
            "warning",
            f"a policy that fills its replies is stopped from call {context.stopped_at} on (a prompt of "
            f"{longest.total:,} tokens, over max_prompt_length {limit:,}): its episode ends with the stop "
            "reason length and is scored as unfinished",
        )


def _row_limits(config: GrpoConfig, context: ContextPlan, must_fit: str) -> Iterator[Finding]:
    longest, typical = (rows[config.credit].longest for rows in (context.worst, context.typical))
    limit = config.max_length
    lost = "their last turns are cut" if config.credit == "trajectory" else "they are left out"
    if typical.tokens > limit:
        yield Finding(
            "refused",
            f"rows of a typical episode take {typical.tokens:,} tokens, over max_length {limit:,}: {lost}",
        )
    elif longest.tokens > limit:
        yield Finding(
            "refused" if must_fit == "longest" else "warning",
            f"training rows take up to {longest.tokens:,} tokens ({longest.visual:,} of images, "
            f"{longest.sampled:,} sampled), over max_length {limit:,}: {lost}; set max_length to "
            f"{longest.tokens:,}, or shorten replies, turns or pictures",
        )


def _picture_limits(config: GrpoConfig, context: ContextPlan, material: Material) -> Iterator[Finding]:
    episode = config.episode
    if material.unshowable:
        yield Finding(
            "always",
            f"{len(material.unshowable)} pages are longer than 200:1 and cannot be shown: "
            f"{_some(material.unshowable)}; every search that finds one fails",
        )
    for kind in ("page", "crop"):
        pixels = getattr(episode, f"{kind}_max_pixels")
        if pixels > LARGEST_PICTURE:
            yield Finding(
                "refused",
                f"{kind}_max_pixels {pixels:,} is over the {LARGEST_PICTURE:,} of Qwen2.5-VL's own "
                "preprocessing; engines would resize such pictures again",
            )
    if material.over_budget:
        yield Finding(
            "refused",
            f"{len(material.over_budget)} pages take up to {context.page_tokens:,} image tokens, over the "
            f"{context.page_budget[1]:,} of page_max_pixels ({_some(material.over_budget)}): both sides are "
            "rounded up to whole tokens; widen the gap between page_min_pixels and page_max_pixels",
        )
    limit = getattr(config, "max_images", None)
    if limit is not None and context.max_images > limit:
        window = "all turns" if episode.window is None else f"a window of {episode.window}"
        yield Finding(
            "always",
            f"prompts hold up to {context.max_images} images ({window}, {episode.max_turns} turns), over "
            f"max_images {limit}: such episodes end with the stop reason image_limit",
        )


def _reply_limits(config: GrpoConfig, context: ContextPlan) -> Iterator[Finding]:
    actions = {"page": "search", "crop": "crop", "answer": "answer"}
    missing = [action for kind, action in actions.items() if kind not in context.possible]
    if missing:
        yield Finding(
            "warning",
            f"no {' and no '.join(missing)} fits in max_completion_length "
            f"{config.max_completion_length:,} after a thought",
        )


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest
