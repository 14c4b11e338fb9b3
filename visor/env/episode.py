"""One question's episode: messages out, replies in, observations back (VISOR Algorithm 1).

The one environment of training and evaluation. It speaks messages; whoever drives it talks to the model.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from visor.env.actions import ParsedResponse, parse_response
from visor.env.config import EpisodeConfig
from visor.env.crop import InvalidBox, Size, crop_region, size_in_context
from visor.env.evidence import EvidenceSpace, evidence_block
from visor.env.observations import ObservationWriter, prompt_messages
from visor.env.policy import EpisodeView, EvidenceEntry, EvidencePolicy
from visor.env.prompts import PromptSet
from visor.env.retained import allocate_pictures, shown_pictures
from visor.env.rules import latest_page, refusal
from visor.env.verification import is_verification
from visor.env.window import build_context, first_in_window
from visor.models.smart_resize import smart_resize
from visor.retrieval.base import Retriever, ScoredPage
from visor.stage_clock import CLOCK
from visor.types import (
    Answer,
    Completion,
    Crop,
    ErrorRecord,
    Invalid,
    Message,
    Observation,
    PageStore,
    Question,
    Search,
    StopReason,
    Trajectory,
    Turn,
)

PageSize = Callable[[str], Size]
AwaitedSearch = Callable[[str, int], Awaitable[list[ScoredPage]]]
"""A search (query, k) that is awaited, as one served together with those of other episodes."""


class EnvironmentFault(RuntimeError):
    """Retrieval or the page store failed. The episode is over and carries the error record: unscored."""


class Episode:
    """A single-use episode: `context()` and `step()` in turn until `done`, then `trajectory()`.

    `store` is the corpus, or a function page id → (width, height) of the stored page in pixels.
    `evidence_policy=None` is the plain agent: the first candidate not yet shown, every thought in full.
    An action the environment refuses (a crop after a crop, anything but an answer at the end) is recorded
    as `Invalid`, with the refused reply as its raw text; so every `Search` of the record was sent.
    """

    def __init__(
        self,
        question: Question,
        retriever: Retriever,
        config: EpisodeConfig,
        prompts: PromptSet,
        store: PageStore | PageSize,
        evidence_policy: EvidencePolicy | None = None,
        seed: int = 0,
        sample_index: int = 0,
        system: str = "visor",
    ) -> None:
        self._question = question
        self._retriever = retriever
        self._config = config
        self._prompts = prompts
        self._page_size = store if callable(store) else _sizes_of(store)
        self._policy = evidence_policy
        self._identity: dict[str, Any] = {"seed": seed, "sample_index": sample_index, "system": system}
        self._writer = ObservationWriter(question.text, prompts, config)
        self._evidence = EvidenceSpace(config.min_thought_chars)
        self._view = EpisodeView(question, page_max_pixels=config.page_max_pixels, prompts=prompts)
        self._prompt = prompt_messages(question.text, prompts, config)
        self._turns: list[Turn] = []
        self._answer: str | None = None
        self._stop_reason: StopReason | None = None
        self._error: ErrorRecord | None = None
        self._block: str | None = None
        self._context: list[Message] | None = None

    @property
    def done(self) -> bool:
        return self._stop_reason is not None

    # ------------------------------------------------------------ what the policy sees

    def context(self) -> list[Message]:
        """The messages of the next policy call (eq. 2). Raises RuntimeError when the episode is over."""
        if self.done:
            raise RuntimeError("the episode is over; an episode answers one question once")
        if self._context is None:
            window = self._config.window
            context = build_context(self._prompt, self._evidence_text(), self._turns, window)
            if self._policy is not None:
                self._view.pictures = shown_pictures(self._turns)
                heading = self._prompts.evidence_heading
                context = allocate_pictures(
                    context, window, len(self._turns), self._policy, self._view, heading
                )
            self._context = context
        return self._context

    def _evidence_text(self) -> str:
        """The evidence block as it stands after the last turn, rendered once a turn."""
        if not self._config.evidence_space:
            return ""
        if self._block is None:
            self._refresh_view()
            self._block = evidence_block(self._view.entries, self._render, self._prompts)
        return self._block

    def _refresh_view(self) -> None:
        self._evidence.mark_window(first_in_window(len(self._turns), self._config.window))
        self._view.entries = self._evidence.entries

    def _render(self, entry: EvidenceEntry) -> list[str]:
        return entry.thoughts if self._policy is None else self._policy.render(entry, self._view)

    # ------------------------------------------------------------ what the policy does

    def step(self, completion: Completion) -> Observation | None:
        """Carry out one reply. Returns the observation, or None when the reply ended the episode.

        Raises EnvironmentFault when retrieval or the page store fails; the turn and the error are recorded
        by then. Raises RuntimeError when the episode is over.
        """
        turn = self._take(completion)
        if not self.done and isinstance(turn.action, Search):
            with self._searching(turn), CLOCK.running("retrieve", turn.action.query):
                candidates = self._retriever.search(turn.action.query, self._pool_size())
            self._show(turn, turn.action.query, candidates)
        return turn.observation

    async def astep(self, completion: Completion, search: AwaitedSearch) -> Observation | None:
        """`step` with another search than the retriever's own, which is awaited."""
        turn = self._take(completion)
        if not self.done and isinstance(turn.action, Search):
            with self._searching(turn):
                candidates = await search(turn.action.query, self._pool_size())
            self._show(turn, turn.action.query, candidates)
        return turn.observation

    def _take(self, completion: Completion) -> Turn:
        """Record a reply as a turn, and carry out all of it but a search."""
        context = self.context()
        parsed = parse_response(completion.text, self._config.box_space)
        turn = Turn(
            index=len(self._turns),
            context=context,
            completion=completion,
            think=parsed.think,
            action=parsed.action,
            format_ok=parsed.format_ok,
            flags=parsed.flags,
        )
        self._record_thought(parsed)
        reason = refusal(parsed.action, self._turns, self._config)
        if reason:
            turn.action = Invalid(reason=reason, raw=completion.text)
        self._turns.append(turn)
        self._context = self._block = None
        if isinstance(turn.action, Answer):
            self._answer = turn.action.text
            self._stop_reason = StopReason.ANSWER
        elif len(self._turns) == self._config.max_turns:
            self._stop_reason = StopReason.MAX_TURNS
        elif isinstance(turn.action, Crop):
            turn.observation = self._crop(turn, turn.action)
        elif isinstance(turn.action, Invalid):
            turn.observation = self._writer.invalid(turn.action.reason, final=self._final())
        return turn

    def _record_thought(self, parsed: ParsedResponse) -> None:
        # A thought that was cut off is on its turn; pinned as evidence it would fill every later context.
        if parsed.think_closed:
            answered = self._turns[-1].observation if self._turns else None
            search_index = len(self._view.queries) - 1
            self._evidence.record(parsed.think, answered, search_index, turn=len(self._turns))

    def _final(self) -> str | None:
        """The evidence block when the next call is the last one, else None."""
        return self._evidence_text() if len(self._turns) == self._config.max_turns - 1 else None

    def _pool_size(self) -> int:
        """How many candidates a search asks for."""
        return self._config.top_k if self._policy is None else self._policy.pool_size(self._config.top_k)

    @contextmanager
    def _searching(self, turn: Turn) -> Iterator[None]:
        """Around the search of a turn: note what is asked and how long the answer takes."""
        assert isinstance(turn.action, Search)
        turn.query = turn.action.query
        turn.is_verification = is_verification(turn.think)
        started = time.perf_counter()
        with self._environment():
            yield
        turn.retrieval_seconds = time.perf_counter() - started

    def _show(self, turn: Turn, query: str, candidates: Sequence[ScoredPage]) -> None:
        """Choose the page to show among the candidates; nothing new when all have been shown or there is
        none."""
        with self._environment():
            turn.candidates = [(hit.page_id, float(hit.score)) for hit in candidates]
            page_id = self._select(query, candidates)
        self._view.queries.append(query)
        if page_id is None:
            turn.observation = self._writer.no_new_page(
                any_candidate=bool(turn.candidates), final=self._final()
            )
        else:
            self._view.shown_page_ids.append(page_id)
            turn.observation = self._writer.page(
                page_id, verification=turn.is_verification, final=self._final()
            )

    def _select(self, query: str, candidates: Sequence[ScoredPage]) -> str | None:
        seen = set(self._view.shown_page_ids)
        unseen = [hit.page_id for hit in candidates if hit.page_id not in seen]
        if self._policy is None:
            return unseen[0] if unseen else None
        self._refresh_view()
        page_id = self._policy.select(query, candidates, self._view)
        assert page_id is None or page_id in unseen, f"{self._policy.name} chose {page_id!r}, not a candidate"
        return page_id

    def _crop(self, turn: Turn, action: Crop) -> Observation:
        shown = latest_page(self._turns)
        assert shown is not None
        _, page_id = shown
        with self._environment():
            page = self._page_size(page_id)
            seen = self._seen_size(turn, page_id, page)
        try:
            region = crop_region(action, page, seen, margin=self._config.crop_margin)
        except InvalidBox as error:
            turn.action = Invalid(reason=str(error), raw=turn.completion.text)
            return self._writer.invalid(str(error), final=self._final())
        return self._writer.crop(page_id, region, final=self._final())

    def _seen_size(self, turn: Turn, page_id: str, page: Size) -> Size:
        """Size at which the policy saw the page: as the client reports it, else by the smart resize."""
        sizes = turn.completion.image_sizes
        if sizes is not None:
            refs = [ref for message in turn.context for ref in message.images]
            return size_in_context(refs, sizes, page_id)
        return smart_resize(
            *page, min_pixels=self._config.page_min_pixels, max_pixels=self._config.page_max_pixels
        )

    @contextmanager
    def _environment(self) -> Iterator[None]:
        """Turn any failure inside into an error record and an EnvironmentFault."""
        try:
            yield
        except Exception as error:
            self.fail("environment", error)
            raise EnvironmentFault(f"{type(error).__name__}: {error}") from error

    # ------------------------------------------------------------ how it ends

    def fail(self, source: Literal["environment", "policy"], error: BaseException) -> None:
        """End the episode because something around the policy broke; the first failure is recorded."""
        if self._error is None:
            self._error = ErrorRecord(source=source, type=type(error).__name__, message=str(error))
            self._stop_reason = StopReason.ERROR

    def stop(self, reason: StopReason) -> None:
        """End the episode without an answer, for a fault of the policy such as a context that is too long."""
        if self.done:
            raise RuntimeError(f"the episode is over already ({self._stop_reason})")
        self._stop_reason = reason

    def trajectory(self) -> Trajectory:
        """Return the record so far; complete once `done`."""
        return Trajectory(
            question_id=self._question.question_id,
            question=self._question.text,
            prompt=self._prompt,
            turns=self._turns,
            answer=self._answer,
            stop_reason=self._stop_reason,
            error=self._error,
            meta=self._meta(),
            **self._identity,
        )

    def _meta(self) -> dict:
        policy = (
            {"name": "none"}
            if self._policy is None
            else {"name": self._policy.name, **self._policy.describe()}
        )
        digest = hashlib.sha256(self._prompts.model_dump_json().encode()).hexdigest()
        return {
            "episode": self._config.model_dump(mode="json"),
            "prompts": {"name": self._prompts.name, "sha256": digest},
            "evidence_policy": policy,
        }


def _sizes_of(store: PageStore) -> PageSize:
    def size(page_id: str) -> Size:
        page = store.page(page_id)
        return page.width, page.height

    return size
