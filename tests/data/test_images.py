import numpy as np
import pytest
from PIL import Image

from data.images import (
    ImageError,
    count_frames,
    is_plain,
    load_page_image,
    shrink_to,
    usable_size,
)
from visor.models.smart_resize import smart_resize


def near(pixel, colour, tolerance=40):
    return all(abs(a - b) <= tolerance for a, b in zip(pixel, colour))


def test_exif_orientation_is_applied(cases):
    image = load_page_image(cases / "exif_rot6.jpg")
    assert image.size == (120, 240)
    assert near(image.getpixel((90, 5)), (255, 0, 0), 80)
    red_rows = np.asarray(image)[:20, 60:, 0].mean()
    green_columns = np.asarray(image)[60:, :5, 1].mean()
    assert red_rows > 180
    assert green_columns > np.asarray(image)[60:, :5, 0].mean()


def test_sixteen_bit_grey_is_scaled(cases):
    values = np.asarray(load_page_image(cases / "gray16_ramp.png"))[:, :, 0]
    assert values.shape == (64, 256)
    assert len(np.unique(values)) >= 200
    assert 120 <= values.mean() <= 136
    assert 120 <= values[0, 128] <= 136
    assert (values == 255).mean() <= 0.02


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.array([[0, 257, 65535]], np.uint16), [0, 1, 255]),
        (np.array([[0.0, 0.5, 1.0]], np.float32), [0, 128, 255]),
        (np.array([[0.0, 100.0, 255.0]], np.float32), [0, 100, 255]),
        (np.array([[-1000.0, 0.0, 1000.0]], np.float32), [0, 128, 255]),
        (np.array([[0, 1, 65535]], np.int32), [0, 0, 255]),
        (np.array([[7, 8, 9]], np.int32), [7, 8, 9]),
        (np.array([[70000, 70000, 70000]], np.int32), [0, 0, 0]),
    ],
)
def test_deep_grey_by_hand(tmp_path, array, expected):
    path = tmp_path / "deep.tif"
    Image.fromarray(array).save(path)
    image = load_page_image(path)
    assert [image.getpixel((x, 0))[0] for x in range(3)] == expected


@pytest.mark.parametrize("name", ["palette_alpha.png", "la_alpha.png"])
def test_transparency_is_laid_over_white(cases, name):
    image = load_page_image(cases / name)
    width, height = image.size
    assert image.getpixel((0, 0)) == (255, 255, 255)
    assert max(image.getpixel((width // 2, height // 2))) <= 60


def test_half_transparent_black_over_white(tmp_path):
    Image.new("RGBA", (30, 30), (0, 0, 0, 128)).save(tmp_path / "half.png")
    assert load_page_image(tmp_path / "half.png").getpixel((0, 0)) == (127, 127, 127)


def test_cmyk_becomes_rgb(tmp_path):
    Image.new("CMYK", (40, 40), (255, 0, 0, 0)).save(tmp_path / "cyan.jpg")
    image = load_page_image(tmp_path / "cyan.jpg")
    assert image.mode == "RGB"
    assert near(image.getpixel((5, 5)), (0, 255, 255))


@pytest.mark.parametrize("name", ["ratio_227.png", "tiny_1x1.png", "tiny_16x16.png", "tiny_257x27.png"])
def test_extreme_shapes_are_padded(cases, name):
    image = load_page_image(cases / name)
    original = Image.open(cases / name).convert("RGB")
    assert image.getpixel((0, 0)) == original.getpixel((0, 0))
    assert np.array_equal(np.asarray(image)[: original.height, : original.width], np.asarray(original))
    width, height = smart_resize(*image.size, min_pixels=256 * 784, max_pixels=512 * 784)
    assert min(width, height) >= 28
    assert width % 28 == height % 28 == 0
    assert max(width, height) / min(width, height) <= 200


@pytest.mark.parametrize(
    ("size", "expected"),
    [((28, 28), (28, 28)), ((1, 1), (28, 28)), ((10000, 3), (10000, 50)), ((30, 6001), (31, 6001))],
)
def test_usable_size(size, expected):
    assert usable_size(*size) == expected


def test_damaged_images_name_the_file(cases, tmp_path):
    with pytest.raises(ImageError, match=r"truncated\.jpg is a truncated"):
        load_page_image(cases / "truncated.jpg")
    (tmp_path / "page.png").write_bytes(b"hello")
    with pytest.raises(ImageError, match=r"page\.png is not an image"):
        load_page_image(tmp_path / "page.png")
    (tmp_path / "none.png").write_bytes(b"")
    with pytest.raises(ImageError, match=r"none\.png is an empty file"):
        load_page_image(tmp_path / "none.png")


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "gif", "bmp", "tif"])
def test_a_cut_file_is_never_filled(tmp_path, suffix):
    rng = np.random.default_rng(0)
    path = tmp_path / f"cut.{suffix}"
    Image.fromarray(rng.integers(0, 255, (64, 64, 3), np.uint8)).save(path)
    load_page_image(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ImageError, match="cut"):
        load_page_image(path)


def test_frames_of_a_tiff(tmp_path):
    frames = [Image.new("RGB", (40, 40), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "scan.tif", save_all=True, append_images=frames[1:])
    assert count_frames(tmp_path / "scan.tif") == 2
    assert load_page_image(tmp_path / "scan.tif", frame=1).getpixel((0, 0)) == (0, 0, 255)


def test_is_plain(cases, tmp_path):
    Image.new("RGB", (40, 40)).save(tmp_path / "a.jpg")
    Image.new("RGBA", (40, 40)).save(tmp_path / "b.png")
    assert is_plain(tmp_path / "a.jpg")
    assert not is_plain(tmp_path / "b.png")
    assert not is_plain(cases / "exif_rot6.jpg")
    assert not is_plain(cases / "tiny_1x1.png")


def test_shrink_keeps_the_ratio():
    assert shrink_to(Image.new("RGB", (400, 100)), 10_000).size == (200, 50)
    image = Image.new("RGB", (100, 100))
    assert shrink_to(image, 10_000) is image
