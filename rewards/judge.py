"""Judges: is an answer right, given the gold answers? Has it a verdict at all?"""

from __future__ import annotations

import asyncio
import hashlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import yaml
from pydantic import BaseModel, ConfigDict

from rewards.answer import matches_any
from rewards.honesty import is_refusal
from rewards.judge_cache import CachedVerdict, JudgeCache, cache_key
from rewards.judge_replies import Verdict, read_grade, read_verdict
from rewards.running import Running
from visor.env.prompts import fill
from visor.models.base import PolicyClient, Request, Sampling
from visor.stage_clock import CLOCK
from visor.text_files import read_text
from visor.types import derive_seed, text_message


class Judge(Protocol):
    """Decides on answers; `name` goes into every record and table that depends on it.

    An empty answer is wrong without a call. A fault gives `Verdict(None, error=…)`, never an exception.
    """

    name: str

    def verdict(self, question: str, gold_answers: Sequence[str], answer: str) -> Verdict:
        """Is the answer right?"""
        ...

    def honest(self, question: str, answer: str) -> Verdict:
        """Does the answer say that the information is missing (VISOR eq. 4, incomplete retrieval)?"""
        ...

    async def averdict(self, question: str, gold_answers: Sequence[str], answer: str) -> Verdict: ...

    async def ahonest(self, question: str, answer: str) -> Verdict: ...


class RuleJudge:
    """Offline: equality by rule with one of the gold answers, and the list of refusal phrases."""

    name = "rule"

    def verdict(self, question: str, gold_answers: Sequence[str], answer: str) -> Verdict:
        return Verdict(matches_any(answer, gold_answers))

    def honest(self, question: str, answer: str) -> Verdict:
        return Verdict(is_refusal(answer))

    async def averdict(self, question: str, gold_answers: Sequence[str], answer: str) -> Verdict:
        return self.verdict(question, gold_answers, answer)

    async def ahonest(self, question: str, answer: str) -> Verdict:
        return self.honest(question, answer)


class JudgePrompt(BaseModel):
    """The two texts of a judge call. `user` has the placeholders {question}, {gold} and {answer}."""

    model_config = ConfigDict(extra="forbid")

    system: str
    user: str

    @property
    def digest(self) -> str:
        """SHA-256 of the two: another wording is another judge."""
        return hashlib.sha256(f"{self.system}\x1f{self.user}".encode()).hexdigest()


def load_judge_prompts(path: Path | None = None) -> dict[str, JudgePrompt]:
    """Read the judge prompts `correctness`, `grade`, `extraction` and `honesty`; None = the shipped ones,
    which also stand in for those that a file does not have. ValueError for a file that has other ones."""
    shipped = Path(__file__).with_name("judge_prompts.yaml")
    prompts = yaml.safe_load(shipped.read_text(encoding="utf-8"))
    if path is not None:
        given = yaml.safe_load(read_text(path))
        if not isinstance(given, dict) or not given.keys() <= prompts.keys():
            raise ValueError(f"{path}: expected judge prompts under the names {', '.join(prompts)}")
        prompts |= given
    return {name: JudgePrompt.model_validate(prompt) for name, prompt in prompts.items()}


@dataclass
class JudgeCounts:
    """What a judge was asked since it was made or the counts were taken."""

    calls: int = 0
    """Requests to the model, repeated ones included."""
    cached: int = 0
    """Verdicts that were known, or asked for by another trajectory at the same time."""
    failures: int = 0
    """Verdicts that could not be had."""

    def take(self) -> dict[str, int]:
        """The counts so far, which begin at 0 again."""
        taken = {"calls": self.calls, "cached": self.cached, "failures": self.failures}
        self.calls = self.cached = self.failures = 0
        return taken


class ModelJudge:
    """A language model judges, through any policy client (VISOR appendix C: binary, with a reference answer).

    With `scale` 5 it grades each answer from 1 to 5, and 4 or more is right (ViDoRAG's protocol).
    `honesty="model"` also asks it for the honesty check; "rule" takes the list of phrases. Temperature 0; a
    reply without a verdict is asked again with another seed, `attempts` times in all; a fault of the client
    is final, since the client has its own retries. At most `max_concurrency` calls run at once.

    With a `cache`, a verdict is kept under (`identity`, prompt, question, reference, answer) and never asked
    again; a failure is not kept. `identity` says which model judges; None = `name`.
    """

    def __init__(
        self,
        client: PolicyClient,
        *,
        prompts: Path | None = None,
        honesty: str = "rule",
        scale: int = 2,
        attempts: int = 3,
        max_tokens: int = 1024,
        max_concurrency: int = 32,
        cache: JudgeCache | None = None,
        identity: str | None = None,
    ) -> None:
        for name, value in (("attempt", attempts), ("concurrent call", max_concurrency)):
            if value < 1:
                raise ValueError(f"a judge needs at least one {name}, got {value}")
        if honesty not in ("rule", "model"):
            raise ValueError(f"honesty is 'rule' or 'model', got {honesty!r}")
        if scale not in (2, 5):
            raise ValueError(f"a judge's scale is 2 (right or wrong) or 5 (grades), got {scale}")
        self.name = f"model:{client.name}" + ("+grade" if scale == 5 else "")
        self.name += "+honesty" if honesty == "model" else ""
        self._prompts = load_judge_prompts(prompts)
        self._correctness = "grade" if scale == 5 else "correctness"
        if prompts is not None:
            self.name += f"+wording:{self._prompts[self._correctness].digest[:8]}"
        self.counts = JudgeCounts()
        self._identity = identity or self.name
        self._client = client
        self._honesty = honesty
        self._attempts = attempts
        self._sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
        self._max_concurrency = max_concurrency
        self._cache = cache
        self._running: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Running[Verdict]] = (
            weakref.WeakKeyDictionary()
        )

    def verdict(self, question: str, gold_answers: Sequence[str], answer: str) -> Verdict:
        """`averdict` for a caller without an event loop."""
        return asyncio.run(self.averdict(question, gold_answers, answer))

    def honest(self, question: str, answer: str) -> Verdict:
        """`ahonest` for a caller without an event loop."""
        return asyncio.run(self.ahonest(question, answer))

    async def averdict(self, question: str, gold_answers: Sequence[str], answer: str) -> Verdict:
        """Ask the model. A client that fails or never gives a verdict makes `Verdict(None, error=…)`."""
        if not answer.strip():
            return Verdict(False)
        return await self._known_or_asked(self._correctness, question, list(gold_answers), answer)

    async def ahonest(self, question: str, answer: str) -> Verdict:
        """Ask the model, or the list of phrases; the reference plays no part."""
        if self._honesty == "rule" or not answer.strip():
            return Verdict(is_refusal(answer))
        return await self._known_or_asked("honesty", question, [], answer)

    @property
    def fingerprint(self) -> str:
        """What a verdict depends on beside what is judged: the model, the scale and the wording."""
        return f"{self._identity} {self._prompts[self._correctness].digest}"

    async def _known_or_asked(self, kind: str, question: str, gold: list[str], answer: str) -> Verdict:
        """The verdict from the cache, from a call under way for the same answer, or from a new one."""
        prompt = self._prompts[kind]
        key = cache_key(self._identity, prompt.digest, question, gold, answer)
        known = await asyncio.to_thread(self._cache.get, key) if self._cache else None
        if known:
            self.counts.cached += 1
            return Verdict(known.value, known.raw, score=known.score)
        running = self._running.setdefault(asyncio.get_running_loop(), Running(self._max_concurrency))
        self.counts.cached += key in running
        return await running.shared(
            key, lambda: self._ask_and_keep(key, prompt, question, gold, answer, running)
        )

    async def _ask_and_keep(
        self,
        key: str,
        prompt: JudgePrompt,
        question: str,
        gold: list[str],
        answer: str,
        running: Running[Verdict],
    ) -> Verdict:
        async with running.slots:
            read = read_grade if prompt is self._prompts["grade"] else read_verdict
            verdict = await self._ask(prompt, read, question=question, gold="\n".join(gold), answer=answer)
        if verdict.value is None:
            self.counts.failures += 1
        elif self._cache:
            entry = CachedVerdict(
                key=key,
                judge=self._identity,
                prompt=prompt.digest,
                question=question,
                reference=gold,
                answer=answer,
                value=verdict.value,
                raw=verdict.raw,
                score=verdict.score,
            )
            await asyncio.to_thread(self._cache.put, entry)
        return verdict

    async def _ask(self, prompt: JudgePrompt, read: Callable[[str], Verdict], **values: str) -> Verdict:
        messages = [text_message("system", prompt.system), text_message("user", fill(prompt.user, **values))]
        raw = ""
        for attempt in range(self._attempts):
            request = Request(messages, derive_seed("judge", attempt, *values.values()), self._sampling)
            self.counts.calls += 1
            try:
                raw = (await self._client.complete(request)).text
            except Exception as error:
                # Retrying is the client's business: it knows a passing fault from a lasting one.
                return Verdict(None, raw, f"{type(error).__name__}: {error}")
            CLOCK.progress()
            verdict = read(raw)
            if verdict.value is not None:
                return verdict
        return Verdict(None, raw, f"no verdict in {self._attempts} replies of {self.name}")
