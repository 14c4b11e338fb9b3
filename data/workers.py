"""Spread rendering over processes, and survive a document that crashes one.

PDFium is not thread-safe, so each worker is a process with one thread that renders. Documents are cut into
chunks of pages; a fixed number of chunks is in flight, so memory does not grow with the corpus.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path

from data.render import DocumentError, RenderedPages, RenderSettings, copy_page_files, render_document
from data.sources import PageFile

CHUNK_PAGES = 16
TASKS_PER_WORKER = 500
"""A worker is replaced after this many chunks, which bounds what the libraries in it hold on to."""


@dataclass(frozen=True)
class Chunk:
    """Pages `first` … `first + CHUNK_PAGES − 1` of a document."""

    doc_id: str
    path: Path
    folder: Path
    settings: RenderSettings
    first: int = 1
    pages: tuple[PageFile, ...] = ()
    """The images of a document that is a group of them; `first` then counts these."""

    @staticmethod
    def chunks_of(page_count: int) -> int:
        """Chunks that a document of so many pages is cut into."""
        return -(-page_count // CHUNK_PAGES)


@dataclass(frozen=True)
class ChunkResult:
    chunk: Chunk
    rendered: RenderedPages | None
    error: str = ""


def render_chunks(chunks: Iterable[Chunk], workers: int) -> Iterator[ChunkResult]:
    """Render documents, each given by its first chunk; yields the result of every chunk as it is done.

    After a first chunk the document's others follow by themselves. `workers` = 1 renders in this process;
    with more, a document that kills its worker yields an error and the rest goes on, and the calling script
    needs the usual `if __name__ == "__main__"` guard.
    """
    if workers == 1:
        for chunk in chunks:
            result = _render(chunk)
            yield result
            yield from map(_render, _following(result))
        return
    fresh = iter(chunks)
    more: deque[Chunk] = deque()
    running: dict[Future, Chunk] = {}
    executor = _new_executor(workers)
    try:
        while True:
            while len(running) < 2 * workers:
                following = more.popleft() if more else next(fresh, None)
                if following is None:
                    break
                running[executor.submit(_render, following)] = following
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            results = [future.result() for future in done if not _is_broken(future)]
            if len(results) < len(done):
                kept = {future for future in done if not _is_broken(future)}
                suspects = [chunk for future, chunk in running.items() if future not in kept]
                executor.shutdown()
                results += map(_render_alone, suspects)
                running, executor = {}, _new_executor(workers)
            for future in done:
                running.pop(future, None)
            for result in results:
                more.extend(_following(result))
                yield result
    finally:
        executor.shutdown(cancel_futures=True)


def _render(chunk: Chunk) -> ChunkResult:
    try:
        span = (chunk.folder, chunk.settings, chunk.first, CHUNK_PAGES)
        rendered = copy_page_files(chunk.pages, *span) if chunk.pages else render_document(chunk.path, *span)
        return ChunkResult(chunk, rendered)
    except DocumentError as error:
        return ChunkResult(chunk, None, str(error))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # the disk is full: no fault of the document, and the next one would fare no better
        return ChunkResult(chunk, None, f"{chunk.path.name} cannot be read: {error.strerror or error}")
    except Exception as error:  # one bad document must not end the run
        return ChunkResult(chunk, None, f"{chunk.path.name} failed: {type(error).__name__}: {error}")


def _render_alone(chunk: Chunk) -> ChunkResult:
    """Render a chunk that was in flight when a worker died, in a process of its own."""
    with _new_executor(1) as executor:
        try:
            return executor.submit(_render, chunk).result()
        except BrokenProcessPool:
            return ChunkResult(chunk, None, f"{chunk.path.name} crashed the process that rendered it")


def _following(result: ChunkResult) -> list[Chunk]:
    if result.rendered is None or result.chunk.first != 1:
        return []
    firsts = range(1 + CHUNK_PAGES, result.rendered.page_count + 1, CHUNK_PAGES)
    return [replace(result.chunk, first=first) for first in firsts]


def _is_broken(future: Future) -> bool:
    return future.done() and isinstance(future.exception(), BrokenProcessPool)


def _new_executor(workers: int) -> ProcessPoolExecutor:
    # spawn: a fork would copy the locks of whatever threads the caller has.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(
        workers, context, initializer=_end_with_parent, max_tasks_per_child=TASKS_PER_WORKER
    )


def _end_with_parent() -> None:
    """Make a worker end when its parent was killed; it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
