"""A model makes an answer short before a benchmark's rules score it, as in MMLongBench-Doc's pipeline."""

from __future__ import annotations

import asyncio
import re
import weakref
from dataclasses import replace
from pathlib import Path

from rewards.judge import load_judge_prompts
from rewards.judge_replies import Verdict
from rewards.scorers import BenchmarkScorer
from visor.env.prompts import fill
from visor.models.base import PolicyClient, Request, Sampling
from visor.types import Question, derive_seed, text_message

SHORT = re.compile(r"<short>(.*?)</short>", re.IGNORECASE | re.DOTALL)


def parse_short(reply: str | None) -> str | None:
    """The text of the last `<short>…</short>`; None where there is none or it is empty."""
    tagged = SHORT.findall(reply or "")
    return tagged[-1].strip() or None if tagged else None


class ExtractingScorer(BenchmarkScorer):
    """A scorer of short answers behind a model that makes them short.

    The model sees the question and the answer, never the gold answer. Temperature 0; a reply without a short
    answer is asked for again, `attempts` times in all, and then leaves no verdict; so does a fault of the
    client, which has its own retries. `Verdict.judged_as` is what was scored.
    """

    def __init__(
        self,
        scorer: BenchmarkScorer,
        client: PolicyClient,
        *,
        prompts: Path | None = None,
        attempts: int = 3,
        max_tokens: int = 1024,
        max_concurrency: int = 32,
    ) -> None:
        self._scorer, self._client = scorer, client
        self._prompt = load_judge_prompts(prompts)["extraction"]
        self._attempts = attempts
        self._sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
        self._max_concurrency = max_concurrency
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        self.name = f"{scorer.name}+extraction:{client.name}"
        if prompts is not None:
            self.name += f"+wording:{self._prompt.digest[:8]}"

    @property
    def fingerprint(self) -> str:
        """What a verdict depends on beside what is judged: the rules, the model and the wording."""
        return f"{self.name} {self._prompt.digest}"

    def verdict_on(self, question: Question, answer: str) -> Verdict:
        return asyncio.run(self.averdict_on(question, answer))

    async def averdict_on(self, question: Question, answer: str) -> Verdict:
        if not answer.strip():
            return Verdict(False, score=0.0)
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._max_concurrency))
        async with slots:
            short, reply, error = await self._extract(question.text, answer)
        if short is None:
            return Verdict(None, reply, error)
        return replace(self._scorer.verdict_on(question, short), raw=reply, judged_as=short)

    async def _extract(self, question: str, answer: str) -> tuple[str | None, str, str]:
        """(short answer, the reply, why there is none)."""
        user = fill(self._prompt.user, question=question, answer=answer)
        messages = [text_message("system", self._prompt.system), text_message("user", user)]
        reply = ""
        for attempt in range(self._attempts):
            request = Request(messages, derive_seed("extraction", attempt, question, answer), self._sampling)
            try:
                reply = (await self._client.complete(request)).text
            except Exception as error:
                return None, reply, f"{type(error).__name__}: {error}"
            short = parse_short(reply)
            if short is not None:
                return short, reply, ""
        return None, reply, f"no short answer in {self._attempts} replies of {self._client.name}"
