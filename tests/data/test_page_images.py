import pytest
from PIL import Image

from data.corpus import Corpus
from data.ingest import ingest
from data.page_images import PageImages


def picture(path, shade=200, size=(40, 56)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, shade, shade)).save(path)
    return path


def grouped(*paths):
    layout = PageImages()
    documents = {}
    for document in layout.find(paths):
        name, path = document[:2]
        pages = getattr(document, "pages", None)
        documents[name] = {page.number: page.path.name for page in pages} if pages else path.name
    return documents, layout.notes


def test_documents_side_by_side_are_never_merged(tmp_path):
    for number in (1, 2, 10, 12):
        picture(tmp_path / f"report_{number}.png")
    for number in (1, 2):
        picture(tmp_path / f"report_1_{number}.jpg")
    picture(tmp_path / "REPORT_1.PNG")
    picture(tmp_path / "report.png")
    documents, notes = grouped(tmp_path)
    assert documents == {
        "report": {1: "report_1.png", 2: "report_2.png", 10: "report_10.png", 12: "report_12.png"},
        "report_1": {1: "report_1_1.jpg", 2: "report_1_2.jpg"},
        "REPORT": {1: "REPORT_1.PNG"},
        "report.png": "report.png",
    }
    assert notes == []


def test_a_folder_a_document(tmp_path):
    for number in range(1, 12):
        picture(tmp_path / "deck a" / f"slide-{number}-1024.jpg")
        picture(tmp_path / "b" / f"{number:04d}.png")
    picture(tmp_path / "b" / "cover.png")
    documents, notes = grouped(tmp_path)
    assert list(documents["deck a"]) == list(documents["b"]) == list(range(1, 12))
    assert documents["deck a"][10] == "slide-10-1024.jpg"
    assert documents["b/cover.png"] == "cover.png"
    assert set(documents) == {"deck a", "b", "b/cover.png"}
    assert notes == []


def test_several_documents_in_a_subfolder(tmp_path):
    for name in ("x_1", "x_2", "y_1"):
        picture(tmp_path / "img" / f"{name}.png")
    documents, _ = grouped(tmp_path)
    assert {name: list(pages) for name, pages in documents.items()} == {"img/x": [1, 2], "img/y": [1]}


@pytest.mark.parametrize(
    ("names", "pages"),
    [
        (["1", "2", "10"], [1, 2, 10]),
        (["page_01", "page_2", "page_010"], [1, 2, 10]),
        (["Slide1", "Slide2", "Slide10"], [1, 2, 10]),
        (["p.1", "p.2"], [1, 2]),
    ],
)
def test_a_folder_that_is_one_document(tmp_path, names, pages):
    for name in names:
        picture(tmp_path / "talk" / f"{name}.png")
    documents, _ = grouped(tmp_path / "talk")
    assert {name: list(found) for name, found in documents.items()} == {"talk": pages}


def test_odd_names_are_noted(tmp_path):
    for name in ("a_1.png", "a_01.png", "a_2.png", "z_0.png", "z_1.png", "scan_20190304.png"):
        picture(tmp_path / name)
    (tmp_path / "paper.pdf").write_text("")
    documents, notes = grouped(tmp_path)
    assert documents["a"] == {1: "a_01.png", 2: "a_2.png"}
    assert documents["z"] == {1: "z_0.png", 2: "z_1.png"}
    assert documents["scan_20190304.png"] == "scan_20190304.png"
    assert any("a_01.png and a_1.png are both page 1" in note for note in notes)
    assert any("z: its names count from 0" in note for note in notes)
    assert any("1 file is no page image and left out: paper.pdf" in note for note in notes)


def test_ingest_of_groups(tmp_path):
    folder, out = tmp_path / "pages", tmp_path / "corpus"
    for number in [*range(1, 21), 25, 26]:
        picture(folder / f"deck_{number}.png", shade=number, size=(40 + number, 56))
    (folder / "deck_7.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    picture(folder / "other_1.png")

    def bring_up_to_date():
        return ingest([folder], out, layout=PageImages().find, ocr="off")

    report = bring_up_to_date()
    assert report.new == ["deck", "other"]
    assert any("deck: pages 21-24: there is no image of it" in note for note in report.notes)
    assert any("deck: page 7: left out: deck_7.png" in note for note in report.notes)
    corpus = Corpus.open(out)
    numbers = [page.page_number for page in corpus.pages() if page.doc_id == "deck"]
    assert numbers == [*range(1, 7), *range(8, 21), 25, 26]
    assert [corpus.page(f"deck#page={n}").width for n in (1, 9, 10, 26)] == [41, 49, 50, 66]
    assert corpus.page_counts() == {"deck": 26, "other": 1}
    kept = (out / corpus.page("deck#page=26").image).read_bytes()
    assert kept == (folder / "deck_26.png").read_bytes()

    assert bring_up_to_date().unchanged == ["deck", "other"]
    picture(folder / "deck_26.png", shade=1)
    (folder / "other_1.png").unlink()
    report = bring_up_to_date()
    assert (report.new, report.removed) == (["deck"], ["other"])
    (folder / "deck_1.png").rename(tmp_path / "aside.png")
    assert bring_up_to_date().new == ["deck"]
    (tmp_path / "aside.png").rename(folder / "deck_1.png")
    assert bring_up_to_date().new == ["deck"]
    assert Corpus.open(out).page_counts() == {"deck": 26}
    for file in folder.iterdir():
        file.write_bytes(b"no picture")
    assert list(bring_up_to_date().failed) == ["deck"]
    assert Corpus.open(out).pages() == []


def test_workers_give_the_same_groups(tmp_path):
    for number in range(1, 40):
        picture(tmp_path / "pages" / "deck" / f"{number}.png", size=(40 + number, 56))
    for workers in (1, 2):
        ingest(
            [tmp_path / "pages"],
            tmp_path / str(workers),
            workers=workers,
            layout=PageImages().find,
            ocr="off",
        )
    assert Corpus.open(tmp_path / "1").pages() == Corpus.open(tmp_path / "2").pages()


def test_the_same_files_under_another_layout(tmp_path):
    for number in (1, 2):
        picture(tmp_path / "pages" / f"a_{number}.png")
    ingest([tmp_path / "pages"], tmp_path / "corpus", ocr="off")
    report = ingest([tmp_path / "pages"], tmp_path / "corpus", layout=PageImages().find, ocr="off")
    assert report.new == ["a"]
    assert ingest(
        [tmp_path / "pages"], tmp_path / "corpus", layout=PageImages().find, ocr="off"
    ).unchanged == ["a"]
    assert ingest([tmp_path / "pages"], tmp_path / "corpus", ocr="off").unchanged == ["a_1.png", "a_2.png"]
