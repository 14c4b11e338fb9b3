"""Episodes played for their length: the environment's own code, with replies and pages of a given size.

Nothing about the context is computed from a formula of its own: a rehearsal is an `Episode` of the run's
configuration, rendered by the run's renderer, so it cannot disagree with what a rollout is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from grpo.planning.scene import Scene
from grpo.planning.wording import Filler
from visor.env.actions import parse_response
from visor.env.config import EpisodeConfig
from visor.env.crop import InvalidBox, crop_region
from visor.env.episode import Episode
from visor.env.prompts import PromptSet
from visor.models.rendering import ChatRenderer
from visor.retrieval.base import ScoredPage
from visor.types import Completion, Crop, FinishReason, Message, Question, Search, Trajectory

Kind = Literal["page", "crop", "notice", "answer"]
"""What a reply brings about: a page, a crop, a notice that it was not possible, or the end."""
Thought = Literal["long", "short"]
"""A long thought fills its reply, a short one leaves the rest of the reply to stand after the action."""

VERIFYING = "verify it"
"""A thought that starts with it gets the verification hint, if it precedes a search."""
ENDINGS: dict[Kind, tuple[str, ...]] = {
    "page": ("</think><search>a</search>",),
    "crop": (
        "</think><bbox>[0,0,9,9]</bbox>",
        "</think><bbox>[0,0,99,99]</bbox>",
        "</think><bbox>[0,0,999,999]</bbox>",
    ),
    "notice": ("</think>", "</think><bbox>a</bbox>", "</think><search></search>", "a"),
    "answer": ("</think><answer>a</answer>",),
}


class _InOrder:
    """Finds the pages of a list one after the other."""

    name = "in order"

    def __init__(self, page_ids: Sequence[str]) -> None:
        self._page_ids = page_ids

    def search(self, query: str, k: int) -> list[ScoredPage]:
        # All of them, whatever k: pages shown before never stand in the way of the next one.
        return [ScoredPage(page_id, -float(i)) for i, page_id in enumerate(self._page_ids)]


@dataclass(frozen=True)
class CallLength:
    """Tokens of the prompt of one policy call, by part."""

    call: int
    """1-based."""
    system: int
    question: int
    evidence: int
    replies: int
    observations: int
    """Their text. That of the last call holds the forced-answer prompt and the evidence once more."""
    visual: int
    """Image tokens."""
    opening: int
    """Of the reply."""
    images: int
    """Number of images."""

    @property
    def text(self) -> int:
        return self.total - self.visual

    @property
    def total(self) -> int:
        parts = (self.system, self.question, self.evidence, self.replies, self.observations)
        return sum(parts) + self.visual + self.opening


class Rehearsal:
    """Plays episodes of one scene in which every reply has `reply_tokens` tokens.

    `cut`: replies end at their token limit, without an end of turn.
    """

    def __init__(
        self,
        scene: Scene,
        episode: EpisodeConfig,
        prompts: PromptSet,
        renderer: ChatRenderer,
        filler: Filler,
        *,
        reply_tokens: int,
        cut: bool,
    ) -> None:
        self.scene, self.episode, self.prompts, self.renderer = scene, episode, prompts, renderer
        self._filler, self._reply_tokens, self._cut = filler, reply_tokens, cut
        self._replies: dict[tuple[Kind, Thought], Completion | None] = {}

    # ------------------------------------------------------------ replies

    def reply(self, kind: Kind, thought: Thought = "long") -> Completion | None:
        """A reply that brings about `kind`; None when its action does not fit in a reply."""
        if (kind, thought) not in self._replies:
            made = (self._make(ending, kind, thought) for ending in ENDINGS[kind])
            fitting = [reply for reply in made if reply is not None and self._does(reply, kind)]
            if kind == "notice":
                fitting.sort(key=self._reason_length, reverse=True)
            self._replies[kind, thought] = fitting[0] if fitting else None
        return self._replies[kind, thought]

    def _make(self, ending: str, kind: Kind, thought: Thought) -> Completion | None:
        room = self._reply_tokens - (not self._cut)
        before = VERIFYING if kind == "page" else ""
        text = ""
        if thought == "short":
            text = next((t for t in (before, "a") if self._tokens(t + ending) <= room), "") + ending
        else:
            text = self._filler.text(room, before, ending) or self._filler.text(room, "", ending)
        ids = self.renderer.text_ids(text)
        if not ids or len(ids) > room:
            return None
        word, missing = self._filler.word, room - len(ids)
        ids += self.renderer.text_ids(word) * missing
        if not self._cut:
            ids.append(self.renderer.im_end_id)
        return Completion(
            text=text + word * missing,
            token_ids=ids,
            finish_reason=FinishReason.LENGTH if self._cut else FinishReason.STOP,
        )

    def _tokens(self, text: str) -> int:
        return len(self.renderer.text_ids(text))

    def _does(self, reply: Completion, kind: Kind) -> bool:
        action = parse_response(reply.text, self.episode.box_space).action
        if kind == "crop":
            return isinstance(action, Crop) and self._is_possible(action)
        return kind != "page" or isinstance(action, Search)

    def _is_possible(self, crop: Crop) -> bool:
        try:
            crop_region(crop, self.scene.page, self.scene.page, margin=self.episode.crop_margin)
        except InvalidBox:
            return False
        return True

    def _reason_length(self, reply: Completion) -> int:
        action = parse_response(reply.text, self.episode.box_space).action
        return self._tokens(getattr(action, "reason", ""))

    # ------------------------------------------------------------ episodes

    def play(self, kinds: Sequence[Kind], thought: Thought = "long") -> Trajectory:
        """The episode whose replies bring about `kinds`, in order."""
        episode = self._start()
        for kind in kinds:
            reply = self.reply(kind, thought)
            assert reply is not None, f"a reply for a {kind} does not fit in {self._reply_tokens} tokens"
            episode.step(reply)
        return episode.trajectory()

    def context_after(self, kinds: Sequence[Kind], thought: Thought = "long") -> list[Message]:
        """The messages of the call that follows these turns."""
        episode = self._start()
        for kind in kinds:
            reply = self.reply(kind, thought)
            assert reply is not None, f"a reply for a {kind} does not fit in {self._reply_tokens} tokens"
            episode.step(reply)
        return episode.context()

    def _start(self) -> Episode:
        question = Question(question_id="plan", text=self.scene.question)
        retriever = _InOrder(self.scene.page_ids)
        return Episode(question, retriever, self.episode, self.prompts, lambda page_id: self.scene.page)

    # ------------------------------------------------------------ lengths

    def lengths(self, kinds: Sequence[Kind], thought: Thought = "long") -> CallLength:
        """Tokens of the prompt of the call that follows these turns."""
        messages = self.context_after(kinds, thought)
        encoded = self.renderer.encode(messages, self.scene.picture)
        parts = dict.fromkeys(("system", "question", "evidence", "replies", "observations"), 0)
        start = 0
        for position, end in enumerate(encoded.message_ends):
            parts[_part(position, messages)] += end - start
            start = end
        visual = sum(end - begin for begin, end in encoded.image_spans)
        parts["observations"] -= visual
        return CallLength(
            call=len(kinds) + 1,
            visual=visual,
            opening=len(encoded.input_ids) - start,
            images=len(encoded.images),
            **parts,
        )

    @cached_property
    def first_prompt(self) -> int:
        """Tokens of the prompt of the first call."""
        return self.lengths([]).total


def _part(position: int, messages: Sequence[Message]) -> str:
    if position < 2:
        return ("system", "question")[position]
    if messages[position].role == "assistant":
        return "replies"
    return "evidence" if position == 2 else "observations"
