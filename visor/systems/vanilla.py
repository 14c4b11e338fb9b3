"""Vanilla: one retrieval with the question, its pages, one call (TAEC, appendix A.8)."""

from __future__ import annotations

from contextlib import suppress

from visor.env.prompts import fill
from visor.models.base import PolicyClient, Sampling
from visor.retrieval.base import Retriever
from visor.systems.config import LoopConfig
from visor.systems.pages import labelled, page_reference
from visor.systems.prompts import VanillaPrompts
from visor.systems.replies import read_answer
from visor.systems.run import QuestionRun, RunOver, TurnListener
from visor.systems.waiting import in_thread, waits
from visor.types import (
    Completion,
    Message,
    Observation,
    ObservationKind,
    Part,
    Question,
    Search,
    TextPart,
    Trajectory,
    Turn,
    text_message,
)


class VanillaSystem:
    """Shows the best pages for the question itself and asks for the answer.

    The retrieval is a turn of the record that no model was asked for (`by_system`); the one call follows it.
    A reply without an answer ends the question with stop reason `max_turns`.
    """

    name = "vanilla"

    def __init__(
        self,
        client: PolicyClient,
        retriever: Retriever,
        config: LoopConfig,
        prompts: VanillaPrompts,
        sampling: Sampling,
    ) -> None:
        self.client = client
        self.retriever = retriever
        self.config = config
        self.prompts = prompts
        self.sampling = sampling

    async def solve(
        self,
        question: Question,
        *,
        seed: int = 0,
        sample_index: int = 0,
        on_turn: TurnListener | None = None,
    ) -> Trajectory:
        """Answer one question. A fault ends it with an error record; it is never raised."""
        run = QuestionRun(self.name, question, self.client, self.sampling, seed, sample_index, on_turn)
        run.meta = {"settings": self.config.model_dump(mode="json"), "prompts": self.prompts.identity}
        run.prompt = [
            text_message("system", self.prompts.system),
            text_message("user", fill(self.prompts.question, question=question.text)),
        ]
        with suppress(RunOver):
            turn = await in_thread(self._retrieve, run) if waits(self.retriever) else self._retrieve(run)
            run.end(turn)
            assert turn.observation is not None
            await self._answer(run, turn.observation.message)
        return run.trajectory()

    def _retrieve(self, run: QuestionRun) -> Turn:
        query = run.question.text
        turn = run.begin(
            context=run.prompt,
            completion=Completion(text=""),
            action=Search(query=query),
            query=query,
            by_system=True,
        )
        hits, turn.retrieval_seconds = run.search(self.retriever, query, self.config.pages_per_search)
        turn.candidates = [(hit.page_id, float(hit.score)) for hit in hits]
        turn.observation = self._observation([hit.page_id for hit in hits], query)
        return turn

    def _observation(self, page_ids: list[str], question: str) -> Observation:
        parts: list[Part] = []
        for number, page_id in enumerate(page_ids, 1):
            label = fill(self.prompts.page, number=str(number))
            parts += labelled(label, page_reference(page_id, self.config))
        ending = self.prompts.pages_end if page_ids else self.prompts.no_page
        parts.append(TextPart(text=fill(ending, question=question)))
        return Observation(
            kind=ObservationKind.PAGE if page_ids else ObservationKind.NO_NEW_PAGE,
            message=Message(role="user", content=parts),
            page_ids=page_ids,
            forced_answer=True,
        )

    async def _answer(self, run: QuestionRun, pages: Message) -> None:
        context = [*run.prompt, pages]
        completion = await run.ask(context)
        think, action, flags = read_answer(completion)
        run.end(
            run.begin(
                context=context,
                completion=completion,
                think=think,
                action=action,
                format_ok=not flags,
                flags=flags,
            )
        )
