"""A caption for each page, asked of a vision model; TAEC reads captions, and text retrieval finds by them."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from data.caption_file import CaptionFile, CaptionLine, CaptionRecipe, merge
from data.corpus import Corpus
from data.pdf import clean_text
from visor.env.crop import ImageCutter
from visor.models.base import PolicyClient, Request, Sampling
from visor.models.loading import make_client
from visor.models.openai import is_unreachable
from visor.models.smart_resize import FACTOR
from visor.types import (
    FinishReason,
    ImagePart,
    ImageRef,
    Message,
    Page,
    Part,
    TextPart,
    derive_seed,
    text_message,
)
from visor.wording import counted

PROMPT_FILE = Path(__file__).with_name("caption_prompt.yaml")
DEFAULT_MAX_PIXELS = 1280 * FACTOR * FACTOR
"""1,280 image tokens of Qwen2.5-VL: body text of a page stays readable."""
DEFAULT_MAX_TOKENS = 512
MIN_PIXELS = 4 * FACTOR * FACTOR
USELESS_STATUSES = frozenset({401, 403, 404, 405})
"""The key, the model or the address is wrong: no other page would fare better."""
FAILURES_IN_A_ROW = 20
"""After so many the endpoint is taken to be down, or unable to serve such requests."""
UNREACHABLE_AT_FIRST = 3
"""So many pages without any connection, before the first caption, and there is no such endpoint."""
_THINKING = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)

Progress = Callable[[int, int, str], None]
"""Called after each page with (pages done, pages to do, page id)."""


@dataclass
class CaptionReport:
    """What a captioning run did."""

    model: str
    pages: int
    """Pages of the corpus."""
    kept: int = 0
    """Pages that had a caption before."""
    new: int = 0
    cut: int = 0
    """New captions that ended at the token limit."""
    failed: dict[str, str] = field(default_factory=dict)
    """Page id → reason."""
    stopped: str = ""
    """Why the run ended before every page was asked; "" when it did not."""
    count: int = 0
    """Captioned pages of the corpus now."""
    replacing: bool = False
    """The pages keep their captions of another recipe, because not every page was asked for yet."""

    @property
    def ok(self) -> bool:
        """False when pages failed and not one has a caption."""
        return bool(self.new or self.kept or not self.failed)

    def summary(self) -> str:
        """The outcome in lines, every failure named."""
        lines = [
            f"{counted(self.new, 'page')} captioned by {self.model}, {self.kept} had a caption, "
            f"{len(self.failed)} failed; {self.count} of {self.pages} pages have one"
        ]
        if self.replacing:
            lines.append("note: the pages keep their earlier captions until every page was asked for")
        if self.cut:
            cut = counted(self.cut, "caption was", "captions were")
            lines.append(f"note: {cut} cut at the token limit; see --max-tokens")
        lines += [f"failed: {page_id}: {reason}" for page_id, reason in self.failed.items()]
        if self.stopped:
            lines.append(f"stopped: {self.stopped}; the same command goes on from here")
        elif self.failed:
            lines.append("the same command asks for the failed pages again")
        return "\n".join(lines)


def caption_corpus(
    path: str | Path,
    model: str,
    *,
    concurrency: int = 4,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    limit: int | None = None,
    replace: bool = False,
    progress: Progress | None = None,
    client: PolicyClient | None = None,
) -> CaptionReport:
    """Ask `model` (a spec such as `openai:NAME@URL`) for the captions that are missing, and merge them.

    Every caption is appended to CORPUS/captions.jsonl as it comes; a run that was killed goes on from there.
    At the end the pages get their captions in one step. `limit` asks for so many pages only. Captions of
    another model, prompt or budget are an error; with `replace` every page is asked for, and the old captions
    go when all were. `client` stands in for the model. Raises ValueError for a setting out of range and for a
    corpus without page images.
    """
    if concurrency < 1 or max_tokens < 1 or (limit is not None and limit < 1):
        raise ValueError("concurrency, max_tokens and limit must be at least 1")
    if max_pixels < MIN_PIXELS:
        raise ValueError(f"max_pixels must be at least {MIN_PIXELS}, got {max_pixels}")
    corpus = Corpus.open(path)
    corpus.check_images()
    client = client or make_client(model, images=ImageCutter(corpus, cache_size=concurrency))
    prompt = yaml.safe_load(PROMPT_FILE.read_text(encoding="utf-8"))
    recipe = CaptionRecipe(
        model=client.name,
        prompt_sha256=hashlib.sha256(PROMPT_FILE.read_bytes()).hexdigest(),
        max_pixels=max_pixels,
        max_tokens=max_tokens,
    )
    pages = corpus.pages()
    with CaptionFile(corpus.path) as file:
        if not replace:
            _refuse_other_recipe(file, recipe)
        done = file.usable(pages, recipe)
        report = CaptionReport(model=client.name, pages=len(pages), kept=len(done))
        missing = [page for page in pages if page.page_id not in done][:limit]
        job = _Job(client, prompt, recipe, file, report, missing, progress)
        asyncio.run(job.run(concurrency))
        if file.other_recipe(recipe) is None or (limit is None and not report.stopped):
            file.keep_only(recipe)
            report.count = merge(corpus.path, file, recipe).count
        else:
            report.count, report.replacing = corpus.captions.count, True
    return report


def _refuse_other_recipe(file: CaptionFile, recipe: CaptionRecipe) -> None:
    other = file.other_recipe(recipe)
    if other is None:
        return
    names = [name for name in CaptionRecipe.model_fields if getattr(other, name) != getattr(recipe, name)]
    differs = ", ".join(f"{name} {getattr(other, name)!r}, not {getattr(recipe, name)!r}" for name in names)
    raise ValueError(
        f"{file.path} holds {len(file.lines)} captions made with {differs}; "
        "--replace asks for every page and then drops them"
    )


class _Useless(Exception):
    """Asking for further pages makes no sense."""


class _Job:
    def __init__(
        self,
        client: PolicyClient,
        prompt: dict[str, str],
        recipe: CaptionRecipe,
        file: CaptionFile,
        report: CaptionReport,
        missing: list[Page],
        progress: Progress | None,
    ) -> None:
        self.client, self.prompt, self.recipe, self.file = client, prompt, recipe, file
        self.report, self.missing, self.progress = report, missing, progress
        self.waiting = iter(missing)
        self.failures_in_a_row = 0
        self.unreachable = 0
        """Pages of this run for which there was no connection to the endpoint."""
        self.done = 0

    async def run(self, concurrency: int) -> None:
        """Ask for every missing page, `concurrency` at once, until done or useless."""
        tasks = [asyncio.create_task(self._work()) for _ in range(min(concurrency, len(self.missing)))]
        try:
            await asyncio.gather(*tasks)
        except _Useless as error:
            self.report.stopped = str(error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self) -> None:
        for page in self.waiting:
            try:
                line = await self._caption(page)
            except Exception as error:  # a page that fails is a record with a reason
                self._fail(page, error)
            else:
                self.file.append(line)
                self.report.new += 1
                self.report.cut += line.cut
                self.failures_in_a_row = 0
            self.done += 1
            if self.progress is not None:
                self.progress(self.done, len(self.missing), page.page_id)

    async def _caption(self, page: Page) -> CaptionLine:
        image = ImageRef(page_id=page.page_id, min_pixels=MIN_PIXELS, max_pixels=self.recipe.max_pixels)
        content: list[Part] = [ImagePart(image=image), TextPart(text=self.prompt["user"].strip())]
        request = Request(
            [
                text_message("system", self.prompt["system"].strip()),
                Message(role="user", content=content),
            ],
            seed=derive_seed("caption", page.page_id),
            sampling=Sampling(temperature=0.0, max_tokens=self.recipe.max_tokens),
        )
        completion = await self.client.complete(request)
        caption = clean_caption(completion.text)
        if not caption:
            raise ValueError("the reply is empty")
        return CaptionLine(
            page_id=page.page_id,
            image_sha256=page.sha256,
            caption=caption,
            cut=completion.finish_reason == FinishReason.LENGTH,
            **self.recipe.model_dump(),
        )

    def _fail(self, page: Page, error: Exception) -> None:
        """Note the failure; raises _Useless when it would be that of every further page."""
        reason = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
        reason = " ".join(reason.split())[:300]
        self.report.failed[page.page_id] = reason
        self.failures_in_a_row += 1
        self.unreachable += is_unreachable(error)
        if getattr(error, "status_code", None) in USELESS_STATUSES:
            raise _Useless(f"the endpoint refuses: {reason}") from error
        if self.unreachable == self.failures_in_a_row >= UNREACHABLE_AT_FIRST and not self.report.new:
            raise _Useless(f"the endpoint cannot be reached: {reason}") from error
        if self.failures_in_a_row >= FAILURES_IN_A_ROW:
            raise _Useless(
                f"{self.failures_in_a_row} pages in a row failed, the last with: {reason}"
            ) from error


def clean_caption(text: str) -> str:
    """A reply as a caption: without a leading thought and control characters."""
    return clean_text(_THINKING.sub("", text))
