"""The VISOR agent: one question's episode driven by a policy client. The one agent loop of the project."""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from visor.env.episode import Episode
from visor.models.base import ContextTooLong, PolicyClient, Request, Sampling, TooManyImages
from visor.systems.searching import SearchBatcher
from visor.types import PageStore, Question, StopReason, Trajectory, Turn, derive_seed

if TYPE_CHECKING:
    from visor.env.config import EpisodeConfig
    from visor.env.policy import EvidencePolicy
    from visor.env.prompts import PromptSet
    from visor.retrieval.base import Retriever

EvidencePolicyFactory = Callable[[Question], "EvidencePolicy | Awaitable[EvidencePolicy | None] | None"]
"""Makes the evidence policy of one episode, None = the plain agent; may be a coroutine function, for a layer
that asks a model about the question first."""
TurnListener = Callable[[Turn], None]


class VisorSystem:
    """Algorithm 1 of VISOR for any policy client.

    `solve` may run many times at once: everything that changes lives in the episode. Searches of episodes
    that wait at the same time are one batch (`SearchBatcher`).
    """

    name = "visor"

    def __init__(
        self,
        client: PolicyClient,
        retriever: Retriever,
        store: PageStore,
        episode_config: EpisodeConfig,
        prompts: PromptSet,
        sampling: Sampling,
        evidence_policy_factory: EvidencePolicyFactory | None = None,
    ) -> None:
        self.client = client
        self.retriever = retriever
        self.store = store
        self.episode_config = episode_config
        self.prompts = prompts
        self.sampling = sampling
        self.evidence_policy_factory = evidence_policy_factory
        self._searches = SearchBatcher(retriever)

    async def solve(
        self,
        question: Question,
        *,
        seed: int = 0,
        sample_index: int = 0,
        on_turn: TurnListener | None = None,
    ) -> Trajectory:
        """Answer one question. A fault ends the episode with an error record; it is never raised.

        The request of turn t is sampled with `derive_seed(seed, question_id, sample_index, t)`, so a reply
        depends on neither the other questions nor the order in which they finish. `on_turn` sees each
        turn as it is done.
        """
        started = time.perf_counter()
        episode = await self._start(question, seed, sample_index)
        turn = 0
        while not episode.done:
            request_seed = derive_seed(seed, question.question_id, sample_index, turn)
            await self._turn(episode, request_seed)
            if on_turn:
                for done in episode.trajectory().turns[turn:]:
                    on_turn(done)
            turn += 1
        trajectory = episode.trajectory()
        trajectory.meta |= {"model": self.client.name, "wall_seconds": time.perf_counter() - started}
        return trajectory

    async def _start(self, question: Question, seed: int, sample_index: int) -> Episode:
        """A fresh episode, failed already when its evidence policy cannot be made."""
        policy, fault = None, None
        try:
            if self.evidence_policy_factory:
                made = self.evidence_policy_factory(question)
                policy = await made if inspect.isawaitable(made) else made
        except Exception as error:
            fault = error
        episode = Episode(
            question,
            self.retriever,
            self.episode_config,
            self.prompts,
            self.store,
            evidence_policy=policy,
            seed=seed,
            sample_index=sample_index,
            system=self.name,
        )
        if fault:
            episode.fail("policy", fault)
        return episode

    async def _turn(self, episode: Episode, request_seed: int) -> None:
        """One policy call and what the environment makes of the reply."""
        try:
            messages = episode.context()
        except Exception as error:
            return episode.fail("environment", error)
        request = Request(messages=messages, seed=request_seed, sampling=self.sampling)
        try:
            completion = await self.client.complete(request)
        except ContextTooLong:
            return episode.stop(StopReason.LENGTH)
        except TooManyImages:
            return episode.stop(StopReason.IMAGE_LIMIT)
        except Exception as error:
            return episode.fail("policy", error)
        try:
            await episode.astep(completion, self._searches.search)
        except Exception as error:
            # An EnvironmentFault is on the record already; the first fault stays.
            episode.fail("environment", error)
        return None
