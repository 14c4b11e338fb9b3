"""Cases B1–B5 of images that break other tools, from the file to the page of a corpus."""

import numpy as np
import pytest
from PIL import Image

from data.corpus import Corpus, ingest
from visor.models.smart_resize import MAX_RATIO, smart_resize


@pytest.fixture
def load(cases, tmp_path):
    """Ingest one image file; its page and its picture."""

    def load(name):
        report = ingest([cases / name], tmp_path / "corpus", ocr="off")
        assert report.failed == {}
        corpus = Corpus.open(tmp_path / "corpus")
        page = corpus.page(f"{name}#page=1")
        image = corpus.image(page.page_id)
        assert (image.mode, image.size) == ("RGB", (page.width, page.height))
        return image

    return load


def test_b1_exif_orientation(load):
    image = load("exif_rot6.jpg")
    assert image.size == (120, 240)  # the view that boxes refer to
    pixels = np.asarray(image).astype(int)
    top, left = pixels[2:10, 60:110], pixels[100:200, 2:6]
    assert top[..., 0].mean() > top[..., 1:].mean() + 100
    assert left[..., 1].mean() > left[..., [0, 2]].mean() + 50


def test_b2_sixteen_bit_grey(load):
    values = np.asarray(load("gray16_ramp.png"))[..., 0]
    assert values.shape == (64, 256)
    assert len(np.unique(values)) >= 200
    assert 120 <= values.mean() <= 136
    assert 120 <= values[30, 128] <= 136
    assert (values == 255).mean() <= 0.02


@pytest.mark.parametrize("name", ["palette_alpha.png", "la_alpha.png"])
def test_b3_transparency(load, name):
    image = load(name)
    assert image.getpixel((0, 0)) == (255, 255, 255)
    assert max(image.getpixel((image.width // 2, image.height // 2))) <= 60


@pytest.mark.parametrize("name", ["ratio_227.png", "tiny_1x1.png", "tiny_16x16.png", "tiny_257x27.png"])
def test_b4_shapes_that_no_processor_takes(load, cases, name):
    image, original = load(name), Image.open(cases / name).convert("RGB")
    assert min(image.size) >= 28
    assert max(image.size) / min(image.size) <= MAX_RATIO
    assert np.array_equal(np.asarray(image)[: original.height, : original.width], np.asarray(original))
    shown = smart_resize(*image.size, min_pixels=256 * 784, max_pixels=512 * 784)
    assert min(shown) >= 28
    assert all(side % 28 == 0 for side in shown)
    assert max(shown) / min(shown) <= MAX_RATIO
    if name == "ratio_227.png":  # the red end is still at the left
        left = np.asarray(image.resize(shown))[: shown[1] // 4, : shown[0] // 50].reshape(-1, 3).mean(axis=0)
        assert left[0] > 150 > left[1]


def test_b5_a_truncated_image_is_named_and_the_run_goes_on(cases, tmp_path):
    report = ingest([cases / "truncated.jpg", cases / "gray16_ramp.png"], tmp_path / "corpus", ocr="off")
    assert report.new == ["gray16_ramp.png"]
    assert report.failed["truncated.jpg"].startswith("truncated.jpg is a truncated or damaged image")
    assert "1 failed" in report.summary()
    record = Corpus.open(tmp_path / "corpus").documents()[-1]
    assert (record.doc_id, record.status, record.page_count) == ("truncated.jpg", "failed", 0)
