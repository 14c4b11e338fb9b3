"""One question's calls: asks the client, keeps the turns, and makes the trajectory, faults included."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from visor.models.base import (
    ContextTooLong,
    PolicyClient,
    Request,
    Sampling,
    Tool,
    ToolsNotSupported,
    TooManyImages,
)
from visor.retrieval.base import Retriever, ScoredPage
from visor.types import (
    Answer,
    Completion,
    ErrorRecord,
    Message,
    Question,
    StopReason,
    Trajectory,
    Turn,
    derive_seed,
)

TurnListener = Callable[[Turn], None]


class System(Protocol):
    """Anything that answers questions. `solve` may run many times at once; a fault is on the record."""

    name: str

    async def solve(
        self,
        question: Question,
        *,
        seed: int = 0,
        sample_index: int = 0,
        on_turn: TurnListener | None = None,
    ) -> Trajectory: ...


class RunOver(Exception):
    """The question is done; why stands on its run."""


class QuestionRun:
    """The record of one question while it is being answered.

    `ask` and `search` end the run by raising RunOver when something breaks; the fault is on the record by
    then. Request number t is sampled with `derive_seed(seed, question_id, sample_index, t)`, as VISOR's are.
    """

    def __init__(
        self,
        system: str,
        question: Question,
        client: PolicyClient,
        sampling: Sampling,
        seed: int,
        sample_index: int,
        on_turn: TurnListener | None = None,
    ) -> None:
        self.question = question
        self.turns: list[Turn] = []
        self.prompt: list[Message] = []
        self.meta: dict[str, Any] = {}
        self.calls = 0
        """Requests that got a reply."""
        self._client = client
        self._sampling = sampling
        self._identity: dict[str, Any] = {"system": system, "seed": seed, "sample_index": sample_index}
        self._on_turn = on_turn
        self._started = time.perf_counter()
        self._answer: str | None = None
        self._stop_reason: StopReason | None = None
        self._error: ErrorRecord | None = None

    async def ask(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), must_call: bool = False
    ) -> Completion:
        """One call. ToolsNotSupported is the caller's to handle; any other failure ends the run."""
        seed, sample = self._identity["seed"], self._identity["sample_index"]
        request = Request(
            messages=list(messages),
            seed=derive_seed(seed, self.question.question_id, sample, self.calls),
            sampling=self._sampling,
            tools=tuple(tools),
            must_call=must_call,
            opens=self.calls == 0,
        )
        try:
            completion = await self._client.complete(request)
        except ToolsNotSupported:
            raise
        except ContextTooLong:
            self._stop_reason = StopReason.LENGTH
            raise RunOver from None
        except TooManyImages:
            self._stop_reason = StopReason.IMAGE_LIMIT
            raise RunOver from None
        except Exception as error:
            self.fail("policy", error)
            raise RunOver from None
        self.calls += 1
        return completion

    def search(self, retriever: Retriever, query: str, k: int) -> tuple[list[ScoredPage], float]:
        """The candidates of a query, and the seconds it took."""
        with self.environment():
            started = time.perf_counter()
            hits = retriever.search(query, k)
            return hits, time.perf_counter() - started

    @contextmanager
    def environment(self) -> Iterator[None]:
        """Any failure inside ends the run as a fault of the environment."""
        try:
            yield
        except RunOver:
            raise
        except Exception as error:
            self.fail("environment", error)
            raise RunOver from None

    def begin(self, **fields: Any) -> Turn:
        """Put a turn on the record; it stays there even when what it asks for fails."""
        turn = Turn(index=len(self.turns), **fields)
        self.turns.append(turn)
        return turn

    def end(self, turn: Turn) -> None:
        """The turn is carried out; an answer ends the run."""
        if isinstance(turn.action, Answer):
            self._answer = turn.action.text
            self._stop_reason = StopReason.ANSWER
        if self._on_turn:
            self._on_turn(turn)

    @property
    def done(self) -> bool:
        return self._stop_reason is not None

    def fail(self, source: Literal["environment", "policy"], error: BaseException) -> None:
        """End the run because something around the model broke; the first failure is recorded."""
        if self._error is None:
            self._error = ErrorRecord(source=source, type=type(error).__name__, message=str(error))
            self._stop_reason = StopReason.ERROR

    def trajectory(self) -> Trajectory:
        """The finished record; a run that nothing ended has used up its calls."""
        return Trajectory(
            question_id=self.question.question_id,
            question=self.question.text,
            prompt=self.prompt,
            turns=self.turns,
            answer=self._answer,
            stop_reason=self._stop_reason or StopReason.MAX_TURNS,
            error=self._error,
            meta=self.meta
            | {"model": self._client.name, "wall_seconds": time.perf_counter() - self._started},
            **self._identity,
        )
