"""A model makes an answer short before a benchmark's rules score it, as in MMLongBench-Doc's pipeline."""

from __future__ import annotations

import asyncio
import re
import weakref
from dataclasses import dataclass, replace
from pathlib import Path

from rewards.judge import load_judge_prompts
from rewards.judge_cache import CachedVerdict, JudgeCache, cache_key
from rewards.judge_replies import Verdict
from rewards.running import Running
from rewards.scorers import BenchmarkScorer
from visor.env.prompts import fill
from visor.models.base import PolicyClient, Request, Sampling
from visor.types import Question, derive_seed, text_message

SHORT = re.compile(r"<short>(.*?)</short>", re.IGNORECASE | re.DOTALL)


def parse_short(reply: str | None) -> str | None:
    """The text of the last `<short>…</short>`; None where there is none or it is empty."""
    tagged = SHORT.findall(reply or "")
    return tagged[-1].strip() or None if tagged else None


@dataclass(frozen=True)
class Extraction:
    """An answer made short."""

    short: str | None
    """None = there is none, and `error` says why."""
    raw: str
    """The reply."""
    error: str = ""


class ExtractingScorer(BenchmarkScorer):
    """A scorer of short answers behind a model that makes them short.

    The model sees the question and the answer, never the gold answer. Temperature 0; a reply without a short
    answer is asked for again, `attempts` times in all, and then leaves no verdict; so does a fault of the
    client, which has its own retries. `Verdict.judged_as` is what was scored.

    With a `cache`, a reply that holds a short answer is kept under (`identity`, prompt, question, answer) and
    never asked for again, whatever the rules then make of it; a failure is not kept. `identity` says which
    model is asked; None = the client's name. The same answer that comes while it is asked about shares the
    call.
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
        cache: JudgeCache | None = None,
        identity: str | None = None,
    ) -> None:
        self._scorer, self._client = scorer, client
        self._prompt = load_judge_prompts(prompts)["extraction"]
        self._attempts = attempts
        self._sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
        self._max_concurrency = max_concurrency
        self._cache = cache
        self._identity = identity or client.name
        self._running: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Running[Extraction]] = (
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
        found = await self._known_or_asked(question.text, answer)
        if found.short is None:
            return Verdict(None, found.raw, found.error)
        verdict = self._scorer.verdict_on(question, found.short)
        return replace(verdict, raw=found.raw, judged_as=found.short)

    async def _known_or_asked(self, question: str, answer: str) -> Extraction:
        """The reply from the cache, from a call under way for the same answer, or from a new one."""
        key = cache_key(self._identity, self._prompt.digest, question, [], answer)
        known = await asyncio.to_thread(self._cache.get, key) if self._cache else None
        if known:
            return Extraction(parse_short(known.raw), known.raw)
        running = self._running.setdefault(asyncio.get_running_loop(), Running(self._max_concurrency))
        return await running.shared(key, lambda: self._ask_and_keep(key, question, answer, running))

    async def _ask_and_keep(
        self, key: str, question: str, answer: str, running: Running[Extraction]
    ) -> Extraction:
        async with running.slots:
            found = await self._ask(question, answer)
        if self._cache and found.short is not None:
            entry = CachedVerdict(
                key=key,
                judge=self._identity,
                prompt=self._prompt.digest,
                question=question,
                reference=[],
                answer=answer,
                value=None,
                raw=found.raw,
            )
            await asyncio.to_thread(self._cache.put, entry)
        return found

    async def _ask(self, question: str, answer: str) -> Extraction:
        user = fill(self._prompt.user, question=question, answer=answer)
        messages = [text_message("system", self._prompt.system), text_message("user", user)]
        reply = ""
        for attempt in range(self._attempts):
            request = Request(messages, derive_seed("extraction", attempt, question, answer), self._sampling)
            try:
                reply = (await self._client.complete(request)).text
            except Exception as error:
                return Extraction(None, reply, f"{type(error).__name__}: {error}")
            short = parse_short(reply)
            if short is not None:
                return Extraction(short, reply)
        return Extraction(None, reply, f"no short answer in {self._attempts} replies of {self._client.name}")
