import json
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_helpers import MemoryCorpus, TextEncoder, check_store

from visor.retrieval.disk import build_lock
from visor.retrieval.generations import (
    open_vectors,
    read_vector_manifest,
    verify_vectors,
)
from visor.retrieval.vector_writer import build_vectors

DOCUMENTS = {
    "a": ["red fox", "blue hen", "", "red fox"],
    "b": [f"page {n}" for n in range(11)],
    "c": ["zero", "grey wolf"],
}


@pytest.fixture
def corpus():
    return MemoryCorpus(DOCUMENTS)


def shard_names(path):
    return {folder.name for folder in (path / "shards").iterdir()}


@pytest.mark.parametrize("kind", ["single", "multi"])
@pytest.mark.parametrize("shard_pages", [1, 4, 4096])
def test_what_is_written_is_read(corpus, tmp_path, kind, shard_pages):
    encoder = TextEncoder(kind=kind)
    report = build_vectors(corpus, tmp_path / "ix", encoder, batch_size=3, shard_pages=shard_pages)
    store = open_vectors(tmp_path / "ix", corpus, encoder.identity)
    check_store(store, corpus, encoder)
    assert store.dtype == (np.float32 if kind == "single" else np.float16)
    assert max(len(shard.rows) for shard in store.shards) <= shard_pages
    assert all(isinstance(s.vectors, np.memmap) for s in store.shards if len(s.vectors))
    assert (report.generation, report.page_count, report.encoded) == (1, 17, 16)
    assert report.empty == ["a#page=3", "c#page=1"]
    assert report.duplicates == [["a#page=1", "a#page=4"]]
    assert report.bytes_on_disk == sum(f.stat().st_size for f in (tmp_path / "ix/shards").glob("*/*"))
    assert "2 pages have nothing to match: a#page=3, c#page=1" in report.summary()
    assert "a#page=1 = a#page=4" in report.summary()


def test_the_files_are_raw_numbers(tmp_path):
    """Anyone can read an index with the layout of the documentation alone."""
    corpus, encoder = MemoryCorpus({"a": ["ab", "", "cde"]}), TextEncoder()
    build_vectors(corpus, tmp_path, encoder)
    [folder] = (tmp_path / "shards").iterdir()
    assert sorted(f.name for f in folder.iterdir()) == ["offsets.bin", "pages.json", "vectors.bin"]
    offsets = np.frombuffer((folder / "offsets.bin").read_bytes(), "<i8")
    assert offsets.tolist() == [0, 2, 2, 5]
    rows = np.frombuffer((folder / "vectors.bin").read_bytes(), "<f2").reshape(5, 8)
    np.testing.assert_array_equal(rows[2:], encoder.vectors("cde").astype(np.float16))
    assert json.loads((folder / "pages.json").read_text())["page_ids"] == [f"a#page={n}" for n in (1, 2, 3)]
    assert (tmp_path / "current").read_text() == "1\n"


def test_a_change_encodes_only_what_is_new(corpus, tmp_path):
    encoder = TextEncoder()
    build_vectors(corpus, tmp_path, encoder, shard_pages=4)
    encoder.asked.clear()
    before = shard_names(tmp_path)
    del corpus.documents["b"]  # a document goes
    corpus.documents["d"] = ["green frog", "blue hen"]  # one comes, with a page like another's
    corpus.documents["a"][0] = "red dog"  # a page changes
    report = build_vectors(corpus, tmp_path, encoder, shard_pages=4)
    assert sorted(encoder.asked) == ["green frog", "red dog"]
    assert (report.generation, report.encoded, report.reused, report.removed) == (2, 2, 6, 12)
    check_store(open_vectors(tmp_path, corpus), corpus, encoder)
    kept = {shard.name for shard in read_vector_manifest(tmp_path).shards}
    assert shard_names(tmp_path) == kept  # what no generation names is gone
    assert kept & before  # and what is still of use was not written again
    assert [f.name for f in (tmp_path / "generations").iterdir()] == ["2.json"]


def test_nothing_to_do_makes_no_generation(corpus, tmp_path):
    encoder = TextEncoder()
    build_vectors(corpus, tmp_path, encoder)
    files = {f: f.stat().st_mtime_ns for f in tmp_path.rglob("*") if f.is_file() and f.name != "lock"}
    encoder.asked.clear()
    report = build_vectors(corpus, tmp_path, encoder)
    assert (report.generation, report.encoded, encoder.asked) == (1, 0, [])
    assert {f: f.stat().st_mtime_ns for f in files} == files


def test_a_page_that_changes_back_and_a_renamed_document_are_not_encoded_again(corpus, tmp_path):
    encoder = TextEncoder()
    build_vectors(corpus, tmp_path, encoder)
    corpus.documents["b"][3] = "other"
    build_vectors(corpus, tmp_path, encoder)
    corpus.documents["b"][3] = "page 3"
    corpus.documents["z"] = corpus.documents.pop("a")
    encoder.asked.clear()
    build_vectors(corpus, tmp_path, encoder)
    assert encoder.asked == []
    check_store(open_vectors(tmp_path, corpus), corpus, encoder)


def test_shards_with_many_dead_pages_and_many_small_shards_are_written_anew(tmp_path):
    encoder = TextEncoder()
    corpus = MemoryCorpus({"a": [f"text {n}" for n in range(10)]})
    build_vectors(corpus, tmp_path, encoder)
    first = shard_names(tmp_path)
    corpus.documents["a"][:3] = ["x", "y", "z"]  # 30 % are dead: kept
    build_vectors(corpus, tmp_path, encoder)
    assert first < shard_names(tmp_path)
    corpus.documents["a"][3] = "w"
    report = build_vectors(corpus, tmp_path, encoder)
    assert first.isdisjoint(shard_names(tmp_path))
    assert report.encoded == 1
    for n in range(12):
        corpus.documents[f"d{n}"] = [f"only page of {n}"]
        assert build_vectors(corpus, tmp_path, encoder).encoded == 1
    assert len(shard_names(tmp_path)) <= 9
    check_store(open_vectors(tmp_path, corpus), corpus, encoder)
    assert verify_vectors(tmp_path) == []


texts = st.lists(st.sampled_from(["", "a", "bb", "ccc", "dd d", "zero"]), max_size=4)
corpora = st.dictionaries(st.sampled_from("abc"), texts, min_size=1).filter(lambda d: any(d.values()))


@settings(max_examples=25, deadline=None)
@given(st.lists(corpora, min_size=1, max_size=5), st.sampled_from([1, 2, 3, 100]))
def test_any_history_ends_with_the_corpus(tmp_path_factory, history, shard_pages):
    path, encoder = tmp_path_factory.mktemp("ix"), TextEncoder(dimension=2)
    for documents in history:
        corpus = MemoryCorpus(documents)
        build_vectors(corpus, path, encoder, batch_size=2, shard_pages=shard_pages)
        check_store(open_vectors(path, corpus, encoder.identity), corpus, encoder)
    assert len(encoder.asked) <= sum(len(t) for d in history for t in d.values())


def test_case_f2_another_encoder_is_refused_by_name(corpus, tmp_path):
    x, y = TextEncoder("X", dimension=128), TextEncoder("Y", dimension=128)
    build_vectors(corpus, tmp_path, x)
    with pytest.raises(ValueError, match=r"made with encoder 'X', not 'Y'; .*rebuild it with `visor index"):
        open_vectors(tmp_path, corpus, y.identity)
    open_vectors(tmp_path, corpus, x.identity)
    other = TextEncoder("X", dimension=128, weights_hash="abc")
    with pytest.raises(ValueError, match=r"another version of encoder 'X' \(weights_hash '', not 'abc'\)"):
        open_vectors(tmp_path, corpus, other.identity)


def test_case_f2_one_document_of_another_encoder_is_refused(tmp_path):
    """Two indexes of equal dimension whose shards someone put together into one."""
    x, y = TextEncoder("X", dimension=128), TextEncoder("Y", dimension=128)
    build_vectors(MemoryCorpus({"a": ["one", "two"]}), tmp_path / "x", x)
    build_vectors(MemoryCorpus({"b": ["three"]}), tmp_path / "y", y)
    [shard] = (tmp_path / "y" / "shards").iterdir()
    shutil.copytree(shard, tmp_path / "x" / "shards" / shard.name)
    manifest = read_vector_manifest(tmp_path / "x")
    manifest.shards += read_vector_manifest(tmp_path / "y").shards
    manifest.page_count = 3
    (tmp_path / "x" / "generations" / "1.json").write_text(manifest.model_dump_json())
    with pytest.raises(ValueError, match=r"encoder 'X', not 'Y' in shard .*'b#page=1'.*rebuild"):
        open_vectors(tmp_path / "x")


def test_a_build_with_another_encoder_encodes_all_and_says_so(corpus, tmp_path):
    build_vectors(corpus, tmp_path, TextEncoder("X"))
    y = TextEncoder("Y")
    with pytest.raises(ValueError, match=r"vectors of 17 pages made with encoder 'X', not 'Y'.*--replace"):
        build_vectors(corpus, tmp_path, y)
    assert y.asked == []
    report = build_vectors(corpus, tmp_path, y, replace=True)
    assert report.encoded == 16
    assert "replaces the index made with encoder 'X'" in report.summary()
    check_store(open_vectors(tmp_path, corpus, y.identity), corpus, y)


def test_another_corpus_is_refused_by_name(corpus, tmp_path):
    encoder = TextEncoder()
    build_vectors(corpus, tmp_path, encoder)
    tales = MemoryCorpus({"a": ["red fox"]}, name="tales")
    with pytest.raises(ValueError, match=r"for corpus 'fables' with 17 pages, .*'tales'.*\(1 pages\)"):
        open_vectors(tmp_path, tales)
    with pytest.raises(ValueError, match=r"holds the index of corpus 'fables' \(17 pages\), not of 'tales'"):
        build_vectors(tales, tmp_path, encoder)
    check_store(open_vectors(tmp_path, corpus), corpus, encoder)
    encoder.asked.clear()
    build_vectors(tales, tmp_path, encoder, replace=True)
    assert encoder.asked == []
    check_store(open_vectors(tmp_path, tales), tales, encoder)


def test_vectors_that_cannot_be_used_end_the_build_and_keep_the_rest(corpus, tmp_path):
    encoder = TextEncoder()
    build_vectors(corpus, tmp_path, encoder)
    grown = MemoryCorpus({**DOCUMENTS, "d": ["fine", "also fine", "nan"]})
    with pytest.raises(ValueError, match=r"'X' gave page 'd#page=3' vectors that are not finite in float16"):
        build_vectors(grown, tmp_path, encoder, batch_size=1)
    check_store(open_vectors(tmp_path, corpus), corpus, encoder)  # still in service
    grown.documents["d"][2] = "mended"
    encoder.asked.clear()
    build_vectors(grown, tmp_path, encoder)
    assert encoder.asked == ["mended"]
    too_large = TextEncoder("L")
    too_large.vectors = lambda text: np.full((1, 8), 1e6, np.float32)
    with pytest.raises(ValueError, match="not finite in float16"):
        build_vectors(grown, tmp_path, too_large, replace=True)
    wrong = TextEncoder("W")
    wrong.vectors = lambda text: np.zeros((2, 7), np.float32)
    with pytest.raises(
        ValueError, match=r"page 'a#page=1' vectors of shape \(2, 7\), expected \(tokens, 8\)"
    ):
        build_vectors(grown, tmp_path, wrong, replace=True)
    check_store(open_vectors(tmp_path, grown), grown, encoder)


def test_two_builds_at_once_are_refused(corpus, tmp_path):
    with build_lock(tmp_path), pytest.raises(ValueError, match="another process is building the index"):
        build_vectors(corpus, tmp_path, TextEncoder())


@pytest.mark.parametrize("name", ["vectors.bin", "offsets.bin", "pages.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "changed"])
def test_a_damaged_file_is_named_and_a_build_mends_it(corpus, tmp_path, name, damage):
    encoder = TextEncoder()
    build_vectors(corpus, tmp_path, encoder, shard_pages=10)
    file = sorted((tmp_path / "shards").iterdir())[0] / name
    data = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(data[:-8] if damage == "cut" else bytes([data[0] ^ 1]) + data[1:])
    assert any(str(file) in problem for problem in verify_vectors(tmp_path))
    if damage == "changed" and name == "vectors.bin":
        open_vectors(tmp_path, corpus)  # sizes fit: only --verify reads everything
    else:
        with pytest.raises(ValueError, match=f"damaged.*{name}"):
            open_vectors(tmp_path, corpus)
    shutil.rmtree(file.parent)  # what the message of --verify says to do
    build_vectors(corpus, tmp_path, encoder, shard_pages=10)
    assert verify_vectors(tmp_path) == []
    check_store(open_vectors(tmp_path, corpus), corpus, encoder)


def test_a_damaged_manifest_is_named_and_a_build_replaces_it(corpus, tmp_path):
    encoder = TextEncoder()
    build_vectors(corpus, tmp_path, encoder)
    (tmp_path / "generations" / "1.json").write_text('{"schema_version": 1')
    with pytest.raises(ValueError, match=r"1\.json is not an index manifest"):
        open_vectors(tmp_path)
    encoder.asked.clear()
    report = build_vectors(corpus, tmp_path, encoder)
    assert encoder.asked == []
    assert "could not be read and is made anew" in report.summary()
    check_store(open_vectors(tmp_path, corpus), corpus, encoder)


def test_no_index_and_no_pages(corpus, tmp_path):
    with pytest.raises(ValueError, match="holds no index of page vectors"):
        open_vectors(tmp_path, corpus)
    with pytest.raises(ValueError, match="fables has no pages"):
        build_vectors(MemoryCorpus({}), tmp_path, TextEncoder())
    only_empty = MemoryCorpus({"a": ["", "zero"]})
    build_vectors(only_empty, tmp_path, TextEncoder())
    check_store(open_vectors(tmp_path, only_empty), only_empty, TextEncoder())


def test_an_open_store_outlives_the_next_generations(corpus, tmp_path):
    encoder = TextEncoder()
    build_vectors(corpus, tmp_path, encoder)
    store = open_vectors(tmp_path, corpus)
    build_vectors(MemoryCorpus({"q": ["only this"]}), tmp_path, encoder)
    check_store(store, corpus, encoder)


def test_opening_starts_over_when_a_build_ends_meanwhile(corpus, tmp_path, monkeypatch):
    from visor.retrieval import generations

    encoder = TextEncoder()
    build_vectors(corpus, tmp_path, encoder)
    corpus.documents = {"q": ["new"]}
    real = generations.check_corpus

    def slowly(*arguments):
        monkeypatch.setattr(generations, "check_corpus", real)
        build_vectors(corpus, tmp_path, encoder)  # removes the shards of the manifest that was read

    monkeypatch.setattr(generations, "check_corpus", slowly)
    store = open_vectors(tmp_path, corpus)
    assert store.generation == 2
    check_store(store, corpus, encoder)


def test_derived_files_belong_to_their_generation(corpus, tmp_path):
    def derive(store, folder):
        (folder / "count.txt").write_text(str(len(store.table)))

    build_vectors(corpus, tmp_path, TextEncoder(), derive=derive)
    assert list(read_vector_manifest(tmp_path).files) == ["generations/1/count.txt"]
    corpus.documents["d"] = ["more"]
    build_vectors(corpus, tmp_path, TextEncoder(), derive=derive)
    assert (tmp_path / "generations/2/count.txt").read_text() == "18"
    assert not (tmp_path / "generations/1").exists()
    (tmp_path / "generations/2/count.txt").write_text("19")
    assert len(verify_vectors(tmp_path)) == 1
