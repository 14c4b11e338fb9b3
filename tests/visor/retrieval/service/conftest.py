"""A small real corpus with its index, and a real `visor serve` over it."""

from pathlib import Path

import pytest

from data.corpus import Corpus, ingest
from visor.retrieval.index import build_index, default_index_path, open_index
from visor.retrieval.service.process import ServiceProcess

CASES = Path(__file__).resolve().parents[4].parent / "shared" / "cases" / "files"
TEXTS = {
    "fruit.pdf": ["apple red sweet", "banana yellow sweet", "cherry red small", "damson blue small"],
    "animals.pdf": ["red fox", "blue hen", "营业收入同比增长 chart", "a b c d e 20 f g chart"],
}


def write_pdf(path, texts):
    from reportlab.pdfbase import pdfmetrics
    from reportlab.pdfbase.cidfonts import UnicodeCIDFont
    from reportlab.pdfgen.canvas import Canvas

    pdfmetrics.registerFont(UnicodeCIDFont("STSong-Light"))
    canvas = Canvas(str(path), pagesize=(200, 140), invariant=True)
    for text in texts:
        canvas.setFont("STSong-Light" if not text.isascii() else "Helvetica", 12)
        canvas.drawString(10, 70, text)
        canvas.showPage()
    canvas.save()


def make_corpus(folder, texts):
    """A corpus folder with a bm25 index, made from PDFs with these texts."""
    documents = folder / "documents"
    documents.mkdir(parents=True)
    for name, pages in texts.items():
        write_pdf(documents / name, pages)
    assert ingest([documents], folder / "corpus", dpi=36, workers=1).ok
    corpus = Corpus.open(folder / "corpus")
    build_index(corpus, default_index_path(corpus.path))
    return corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("served"), TEXTS)


@pytest.fixture(scope="session")
def retriever(corpus):
    """The same index in this process."""
    return open_index(default_index_path(corpus.path), corpus)


@pytest.fixture(scope="session")
def service(corpus, tmp_path_factory):
    """With pages and the peers' protocol; for tests that change nothing."""
    links = tmp_path_factory.mktemp("links")
    options = ("--with-pages", "--peer-protocol", "--peer-images", str(links), "--max-queries", "20")
    with ServiceProcess(corpus.path, *options) as process:
        yield process


@pytest.fixture(scope="session")
def cases():
    if not CASES.is_dir():
        pytest.skip("the shared folder with the case files is absent")
    return CASES
