"""Documents → corpus: only new or changed ones are rendered, failures are recorded and named."""

from __future__ import annotations

import difflib
import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from data.corpus_files import IMAGES_FOLDER, PAGES_FILE, legible, read_corpus
from data.corpus_writer import CorpusWriter, only_one
from data.ingest_report import IngestReport, OnProgress
from data.ocr_stage import Ocr, read_pages, usable_engine
from data.render import DEFAULT_DPI, DEFAULT_MAX_PIXELS, RenderSettings
from data.render_stage import RenderStage
from data.sources import Layout, find_sources, normalise_id
from data.workers import DEFAULT_TIME_LIMIT, WorkerPool, available_cores


def ingest(
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    dpi: float = DEFAULT_DPI,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    image_format: Literal["jpeg", "png"] = "jpeg",
    ocr: Ocr = "auto",
    workers: int | None = None,
    time_limit: float = DEFAULT_TIME_LIMIT,
    progress: OnProgress | None = None,
    layout: Layout = find_sources,
) -> IngestReport:
    """Bring the corpus in folder `out` up to date with the PDFs and images under `paths`.

    A document is rendered when it is new, changed, failed before, or was rendered with other settings. One
    whose file below `paths` is gone loses its pages; documents from elsewhere stay. Then pages of the given
    documents that have no text are read by OCR: "auto" where it is installed, "on" or an error, or "off".
    What is done is kept on disk all the time, so that a killed run continues where it was. Work is done by
    `workers` processes (None: one a core), at most `time_limit` seconds for a few pages. `layout` finds the
    documents below `paths`.

    Raises ValueError when `paths` hold no document, a path does not exist, a setting is out of range, OCR is
    "on" and cannot be used, or another ingest works on `out`; OSError when the disk is full.
    """
    started = time.monotonic()
    settings = RenderSettings(dpi=dpi, max_pixels=max_pixels, image_format=image_format)
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if not time_limit > 0:
        raise ValueError(f"time_limit must be above 0 seconds, got {time_limit}")
    engine = usable_engine(ocr)
    out = Path(out)
    if legible(str(out)) != str(out):
        raise ValueError(f"{out}: the name of a corpus folder must be UTF-8; give the corpus another folder")
    found = layout(paths, out)
    roots = [Path(os.path.abspath(path)) for path in paths]
    if not found:
        names = ", ".join(str(path) for path in paths)
        kept = _kept(out, roots)
        raise ValueError(f"no PDF or image found in {names or 'an empty list of paths'}{kept}")
    (out / IMAGES_FOLDER).mkdir(parents=True, exist_ok=True)
    report = IngestReport()
    with only_one(out) as lock, WorkerPool(workers or available_cores(), time_limit, keep=(lock,)) as pool:
        corpus = CorpusWriter(out)
        stage = RenderStage(corpus, settings, found, roots, report)
        try:
            stage.run(pool, progress)
            if engine:
                read_pages(corpus, stage.doc_ids, engine, pool, report, progress, required=ocr == "on")
        except KeyboardInterrupt:
            corpus.save()
            raise
        except OSError as error:
            raise _in_words(error, out) from None
        corpus.save()
        corpus.clean()
    _count(corpus, report, started)
    return report


def remove_documents(doc_ids: Sequence[str], out: str | Path) -> IngestReport:
    """Take documents out of a corpus, with their pages and images.

    A later ingest of a folder that still holds their files brings them back. Raises ValueError, and removes
    nothing, when the corpus has no document of one of the ids.
    """
    started = time.monotonic()
    out, report = Path(out), IngestReport()
    if not (out / PAGES_FILE).is_file():
        raise ValueError(f"{out} is not a corpus: it has no {PAGES_FILE}")
    with only_one(out):
        corpus = CorpusWriter(out)
        for doc_id in dict.fromkeys(map(normalise_id, doc_ids)):
            if doc_id not in corpus.documents:
                near = difflib.get_close_matches(doc_id, corpus.documents, n=1, cutoff=0.0)
                hint = f"; the nearest is {near[0]!r}" if near else ""
                raise ValueError(f"corpus {out} has no document {doc_id!r}{hint}")
            corpus.remove(doc_id)
            report.removed.append(doc_id)
        corpus.save()
        corpus.clean()
    _count(corpus, report, started)
    return report


def _kept(out: Path, roots: Sequence[Path]) -> str:
    """What is to be said when no document is left below the given folders: the corpus still has those it had.

    An empty folder is rather one that is not mounted than one whose documents are all to go.
    """
    if not (out / PAGES_FILE).is_file():
        return ""
    documents = read_corpus(out)[0].values()
    had = [record.doc_id for record in documents if any(record.path.is_relative_to(root) for root in roots)]
    if not had:
        return ""
    names = ", ".join(had[:3]) + (", …" if len(had) > 3 else "")
    return (
        f"; corpus {out} keeps what it has from there ({names}): to take documents out, use "
        f"`visor ingest --remove DOC_ID… -o {out}`"
    )


def _in_words(error: OSError, out: Path) -> OSError:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    return OSError(
        f"the disk of {out} is full; what was ingested so far is kept: make room and run the command again"
    )


def _count(corpus: CorpusWriter, report: IngestReport, started: float) -> None:
    without = [page for page in corpus.pages.values() if not (page.text or page.caption)]
    report.pages = len(corpus.pages)
    report.pages_without_text = len(without)
    report.pages_not_read = sum(page.text_source == "none" for page in without)
    report.seconds = time.monotonic() - started
